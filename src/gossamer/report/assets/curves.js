// Scores over time and over epochs: the two views in which the methods differ.

const MEASURES = {
  accuracy: { title: "Test accuracy", isLog: false, show: showAccuracy, isLowerBetter: false },
  loss: { title: "Test loss", isLog: true, show: showNumber, isLowerBetter: true },
  training_loss: { title: "Training loss", isLog: true, show: showNumber, isLowerBetter: true },
  consensus_distance: { title: "Consensus distance", isLog: true, show: showNumber, isLowerBetter: true },
  noise_scale: { title: "Noise scale in samples", isLog: true, show: showNumber, isLowerBetter: false },
  // A metric of the task's own, by its own name.
  metric: { get title() { return `Test ${state.data.score}`; }, isLog: false, show: showNumber, get isLowerBetter() { return Boolean(state.data.lower_is_better); } },
};

// The curve by which the methods are judged.
function scoreKey() {
  return state.data.score === "accuracy" || state.data.score === "loss" ? state.data.score : "metric";
}
// Beyond this ratio of run times a linear axis squeezes the fast methods into its first pixels.
const LOG_TIME_RATIO = 12;
// Workers this much closer than the others are equal up to rounding; an axis that shows how equal
// would flatten all that differs.
const ROUNDING_DISTANCE = 1e-4;

function curveOf(method, along, key) {
  const curve = method.curves && method.curves[along] ? method.curves[along][key] : null;
  if (!curve) return null;
  const [xs, ys, low, high] = [list(curve.x), list(curve.mean), list(curve.low), list(curve.high)];
  const points = xs.map((x, at) => ({ x, y: ys[at], low: low[at], high: high[at] }))
    .filter((point) => isNumber(point.x) && isNumber(point.y));
  return points.length ? points : null;
}

function curvesOf(along, key) {
  return shownMethods().map((method) => ({ method, points: curveOf(method, along, key) }))
    .filter((one) => one.points);
}

function placeAxis(colours, curves, along) {
  const ends = curves.map((one) => one.points[one.points.length - 1].x);
  const [soonest, latest] = [Math.min(...ends), Math.max(...ends)];
  if (along === "time" && soonest > 0 && latest > LOG_TIME_RATIO * soonest) {
    const positive = curves.flatMap((one) => one.points.map((point) => point.x)).filter((x) => x > 0);
    return logAxis(colours, Math.max(Math.min(...positive), soonest / 20), latest * 1.05);
  }
  return linearAxis(colours, 0, latest > 0 ? latest : 1);
}

function valueAt(points, x) {
  if (x < points[0].x || x > points[points.length - 1].x) return null;
  const after = points.findIndex((point) => point.x >= x);
  const [one, other] = [points[Math.max(0, after - 1)], points[after]];
  const share = other.x > one.x ? (x - one.x) / (other.x - one.x) : 1;
  return one.y + share * (other.y - one.y);
}

// Show where the methods differ: the start, the same for all of them, is left out.
function accuracyAxis(colours, curves, target) {
  const ends = curves.map((one) => one.points[one.points.length - 1].y - 0.03);
  const early = curves.map((one) => {
    // A curve that is alone is compared with nothing: all of it is shown.
    if (allMethods().length === 1) return one.points[0].y;
    const last = one.points[one.points.length - 1].x;
    const value = valueAt(one.points, last * 0.3);
    return value === null ? one.points[0].y : value;
  });
  const goal = isNumber(target) ? [target - 0.03] : [];
  const lowest = Math.min(...early, ...ends, ...goal);
  const best = Math.max(...curves.flatMap((one) => one.points.map((point) => point.y)), ...(goal.length ? [target] : []));
  const start = lowest < 0.15 ? 0 : lowest;
  const step = Math.max(0.002, niceStep(start, best));
  const bottom = Math.max(0, step * Math.floor(start / step + 1e-6));
  const top = Math.min(1, Math.max(step * Math.ceil((best + 0.1 * step) / step), bottom + step));
  return { ...linearAxis(colours, bottom, top, showAccuracy), interval: step };
}

function valueAxis(colours, curves, key, target) {
  if (key === "accuracy") return accuracyAxis(colours, curves, target);
  if (key === "metric") return linearAxis(colours, null, null);
  const values = curves.flatMap((one) => one.points.map((point) => point.y));
  // A run that diverged may leave at the top; it must not flatten all the others.
  const first = Math.max(...curves.map((one) => one.points[0].y));
  const best = curves.map((one) => Math.min(...one.points.map((point) => point.y)));
  const positive = values.filter((value) => value > 0 && (key === "consensus_distance" || key === "noise_scale" || value <= Math.max(first, ...best)));
  const found = span([...positive, isNumber(target) && target > 0 ? target : null]);
  if (!found) return linearAxis(colours, null, null);
  if (key === "consensus_distance") found[0] = Math.max(found[0], found[1] * ROUNDING_DISTANCE);
  const margin = Math.max(1.05, (found[1] / found[0]) ** 0.06);
  return logAxis(colours, found[0] / margin, found[1] * margin);
}

// A band is one polygon over all its points: lows forth, highs back.
function bandSeries(method, points, look, crowd) {
  const known = points.filter((point) => isNumber(point.low) && isNumber(point.high));
  if (known.length < 2) return null;
  return {
    type: "custom",
    name: `${method.label} band`,
    silent: true,
    clip: true,
    z: 1,
    data: [[known[0].x, known[0].y]],
    renderItem: (_, api) => ({
      type: "polygon",
      shape: {
        points: [...known.map((point) => api.coord([point.x, point.low])),
          ...[...known].reverse().map((point) => api.coord([point.x, point.high]))]
          .filter((place) => place.every(isNumber)),
      },
      style: { fill: look.colour, opacity: Math.min(0.16, 0.9 / crowd) },
    }),
  };
}

function targetSeries(target, measure, colours) {
  return {
    type: "line",
    name: "target",
    data: [],
    silent: true,
    markLine: {
      silent: true,
      symbol: "none",
      data: [{ yAxis: target }],
      lineStyle: { color: colours.faint, type: [3, 3], width: 1.2 },
      label: {
        formatter: `target\n${measure.show(target)}`,
        position: "end",
        color: colours.faint,
        fontSize: 12,
        lineHeight: 15,
      },
    },
  };
}

function curveTooltip(curves, measure, words) {
  return (params) => {
    const at = list(params).length ? params[0].axisValue : null;
    if (!isNumber(at)) return "";
    // Whoever has ended keeps what it had: the leader does not vanish for having arrived.
    const rows = curves.map((one) => ({ method: one.method, value: valueAt(one.points, Math.min(at, one.points[one.points.length - 1].x)) }))
      .filter((one) => isNumber(one.value))
      .sort((one, other) => (measure.isLowerBetter ? 1 : -1) * (one.value - other.value));
    return tooltipBox(`${showNumber(at)} ${words}`,
      rows.map((one) => [swatch(lookOf(one.method)), one.method.label, measure.show(one.value)]));
  };
}

function curveOption(curves, key, along, target) {
  const measure = MEASURES[key];
  return (width, colours) => {
    const words = along === "time" ? timeWord() : "epochs";
    const x = placeAxis(colours, curves, along);
    // One scale of values for both views, to compare them across.
    const common = curvesOf("epochs", key);
    const lines = curves.flatMap((one) => lineSeries(one.method, one.points, placeOf(one.method), allMethods().length));
    const bands = curves.map((one) => bandSeries(one.method, one.points, lookOf(one.method), curves.length));
    return {
      // Room for the word at the end of the target's line.
      grid: { left: 6, right: isNumber(target) ? 54 : 16, top: 12, bottom: 24, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      xAxis: { ...x, name: `${words}${x.type === "log" ? " (log scale)" : ""}`, nameLocation: "middle", nameGap: 28 },
      yAxis: valueAxis(colours, common.length ? common : curves, key, target),
      tooltip: tooltip(colours, {
        trigger: "axis",
        axisPointer: { type: "line", snap: false, lineStyle: { color: colours.faint, type: "dashed" }, label: { show: false } },
        formatter: curveTooltip(curves, measure, words),
      }),
      series: [...bands.filter((band) => band), ...lines,
        ...(isNumber(target) ? [targetSeries(target, measure, colours)] : [])],
    };
  };
}

function curveNumbers(curves, measure, along) {
  return () => ({
    titles: ["method", along === "time" ? timeWord() : "epochs", "mean", "lowest seed", "highest seed"],
    rows: curves.flatMap(({ method, points }) => {
      // Twelve rows a method tell the course; all of them would bury the reader.
      const stride = Math.max(1, Math.floor(points.length / 12));
      return points.filter((_, at) => at % stride === 0 || at === points.length - 1)
        .map((point) => [method.label, { text: showNumber(point.x), value: point.x },
          ...["y", "low", "high"].map((part) => ({
            text: measure.show(point[part]), value: isNumber(point[part]) ? point[part] : null,
          }))]);
    }),
  });
}

function equalWorkers(curves) {
  const tops = curves.map((one) => Math.max(...one.points.map((point) => point.y)));
  const equal = curves.filter((_, at) => tops[at] < ROUNDING_DISTANCE * Math.max(...tops)).map((one) => one.method.label);
  return equal.length ? ` Below the axis: ${enumerate(equal)}, whose workers agree up to rounding.` : "";
}

const CURVE_WORDS = {
  time: "Which method is first in time: further left is faster.",
  epochs: "How much each gradient contributes: methods with stale gradients need more of them.",
};
const ALONE_WORDS = {
  time: "Over time, waiting included.",
  epochs: "Over passes through the data, however long they took.",
};
const MEASURE_WORDS = {
  accuracy: "Judged by accuracy: the share of test samples that are classified correctly.",
  metric: "The metric that the task names.",
  loss: "Loss still differs between methods where accuracy is flat; a line that turns up is overfitting or diverging.",
  training_loss: "The loss on the training batches. If it is low and the test loss is high, the model overfits.",
  consensus_distance: "How far the workers' models are from their mean, relative to it. A rising line means that workers drift apart.",
  noise_scale: "The batch, of all workers together, from which on a larger one hardly saves steps; it grows as training goes on. Missing where the gradient is lost in noise.",
};

function curveFigure(key, along) {
  const curves = curvesOf(along, key);
  const measure = MEASURES[key];
  // What was taken at the end only is a figure of the table and no course; a logarithm has no zero.
  const drawn = (points) => points.filter((point) => !measure.isLog || point.y > 0);
  if (!curves.some((one) => drawn(one.points).length > 1)) return null;
  const target = key === scoreKey() ? state.data.target : null;
  const words = along === "time" ? timeWord() : "epochs";
  const bands = curves.some((one) => one.points.some((point) => isNumber(point.low)));
  const viewWords = allMethods().length > 1 ? CURVE_WORDS : ALONE_WORDS;
  const told = key === scoreKey() ? viewWords[along] : MEASURE_WORDS[key];
  return figure(`${key}-${along}`, {
    title: `${measure.title} over ${words}${measure.isLog ? " (log scale)" : ""}`,
    caption: told + (key === "consensus_distance" ? equalWorkers(curves) : "") + (bands ? " Lines are means, bands the range over seeds." : ""),
    height: (width) => (width < 480 ? 280 : 350),
    option: curveOption(curves, key, along, target),
    numbers: curveNumbers(curves, measure, along),
  });
}

function curvePair(key) {
  return columns(`curves-${key}`, curveFigure(key, "time"), curveFigure(key, "epochs"));
}
