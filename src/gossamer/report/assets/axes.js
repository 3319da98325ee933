// Axes that look the same in all charts, and logarithmic ones with ticks at 1, 2, 5.

function baseAxis(colours) {
  return {
    axisLine: { show: false, lineStyle: { color: colours.line } },
    axisTick: { show: false },
    axisLabel: { color: colours.faint, fontSize: 12, hideOverlap: true },
    splitLine: { show: true, showMaxLine: false, lineStyle: { color: colours.line, width: 1 } },
    nameTextStyle: { color: colours.faint, fontSize: 12 },
  };
}

function linearAxis(colours, low, high, show) {
  const axis = baseAxis(colours);
  axis.axisLabel.formatter = show || showTick;
  // An axis that ends where its data end has an odd number there, which is nothing to read off.
  const steps = isNumber(high) ? high / niceStep(low || 0, high) : 0;
  if (Math.abs(steps - Math.round(steps)) > 1e-6) axis.axisLabel.showMaxLabel = false;
  return { ...axis, type: "value", min: low, max: high };
}

// An axis that may end between two ticks: its end is no tick, so that no two numbers touch there.
function evenAxis(colours, low, high, most) {
  let step = niceStep(low, high);
  if ((high - low) / step > most) step *= 2;
  const axis = linearAxis(colours, low, high, (value) => showTick(Number(value.toPrecision(5))));
  const isWhole = (value) => Math.abs(value / step - Math.round(value / step)) < 1e-6;
  axis.axisLabel = { ...axis.axisLabel, showMinLabel: isWhole(low), showMaxLabel: isWhole(high) };
  return { ...axis, interval: step };
}

function logTicks(low, high) {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const digit of [1, 2, 5]) {
      const tick = Number((digit * 10 ** power).toPrecision(1));
      if (tick >= low * 0.999 && tick <= high * 1.001) all.push(tick);
    }
  }
  const decades = all.filter((tick) => Math.abs(Math.log10(tick) % 1) < 1e-9);
  if (all.length < 3) {
    const step = niceStep(low, high);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(6)));
  }
  if (all.length <= 8) return all;
  // Over many decades every second, third... power of ten is enough.
  const stride = Math.ceil(decades.length / 8);
  return decades.filter((_, index) => index % stride === 0);
}

function logAxis(colours, low, high, show) {
  const axis = baseAxis(colours);
  const ticks = logTicks(low, high);
  axis.axisLabel = { ...axis.axisLabel, formatter: show || showTick, customValues: ticks };
  axis.axisTick = { ...axis.axisTick, customValues: ticks };
  axis.splitLine = { ...axis.splitLine, customValues: ticks };
  return { ...axis, type: "log", logBase: 10, min: low, max: high };
}

// A method's options go on a line of their own where the name would squeeze the chart.
function wrapLabel(label) {
  return label.length > 16 ? label.replace(":", ":\n") : label;
}

function methodAxis(colours, methods, width) {
  return {
    type: "category",
    inverse: true,
    data: methods.map((method) => method.label),
    axisLine: { show: true, lineStyle: { color: colours.line } },
    axisTick: { show: false },
    axisLabel: {
      color: colours.ink,
      fontSize: 12,
      lineHeight: 15,
      interval: 0,
      formatter: wrapLabel,
      width: labelRoom(methods, width) - 14,
      overflow: "truncate",
    },
  };
}

function labelRoom(methods, width) {
  const lines = methods.flatMap((method) => wrapLabel(method.label).split("\n"));
  const longest = Math.max(4, ...lines.map((line) => line.length));
  return Math.min(longest * 7.2 + 20, width * 0.36);
}

function rowsHeight(methods, row, more) {
  const lines = Math.max(1, ...methods.map((method) => wrapLabel(method.label).split("\n").length));
  return Math.max(1, methods.length) * Math.max(row, lines * 15 + 6) + more;
}

// The steps of an axis from low to high: 1, 2 or 5 times a power of ten, at most eight of them.
function niceStep(low, high) {
  const rough = Math.max(high - low, 1e-9) / 8;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999);
}

function niceTop(high) {
  const step = niceStep(0, high);
  return step * Math.ceil(high / step - 1e-9);
}

// The least and the greatest of the numbers, or null if there is none.
function span(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!isNumber(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}

function kindLegend(colours, kinds) {
  return {
    top: 0, left: 0, selectedMode: false, itemWidth: 22, itemHeight: 13, itemGap: 18, data: kinds,
    textStyle: { color: colours.ink, fontSize: 12.5 }, icon: "rect",
  };
}
