// How old the gradients were when they were applied: one small histogram a method, equal axes.

function agesOf(method) {
  return Object.entries(method.staleness || {})
    .map(([age, count]) => [Number(age), count])
    .filter(([age, count]) => isNumber(age) && isNumber(count) && count > 0)
    .sort((one, other) => one[0] - other[0]);
}

function meanAge(ages) {
  const total = sum(ages.map(([, count]) => count));
  return total ? sum(ages.map(([age, count]) => age * count)) / total : 0;
}

// Equal bins for all methods; wide ones where ages spread, so that bars stay visible.
function binned(ages, width, bins) {
  const total = sum(ages.map(([, count]) => count));
  const shares = Array.from({ length: bins }, () => 0);
  for (const [age, count] of ages) shares[Math.min(bins - 1, Math.floor(age / width))] += count / total;
  return shares;
}

function panelPlaces(count, width) {
  const across = Math.max(1, Math.min(count, Math.floor(width / 250)));
  const panel = { width: Math.min(480, width / across), height: 150 };
  const places = Array.from({ length: count }, (_, at) => ({
    left: (at % across) * panel.width + 42,
    top: Math.floor(at / across) * panel.height + 26,
    width: panel.width - 58,
    height: panel.height - 62,
  }));
  return { places, height: Math.ceil(count / across) * panel.height + 8 };
}

function stalenessOption(stale, bin, bins) {
  return (width, colours) => {
    const { places } = panelPlaces(stale.length, width);
    const names = Array.from({ length: bins }, (_, at) => (bin === 1 ? String(at) : `${at * bin}–${at * bin + bin - 1}`));
    const shares = stale.map((one) => binned(one.ages, bin, bins));
    const top = Math.max(...shares.flat());
    return {
      grid: places,
      title: stale.map((one, at) => ({
        text: one.method.label,
        left: places[at].left - 4,
        top: places[at].top - 24,
        textStyle: { fontSize: 12.5, fontWeight: 600, color: colours.ink, width: places[at].width, overflow: "truncate" },
      })),
      xAxis: stale.map((_, at) => ({
        ...baseAxis(colours), type: "category", data: names, gridIndex: at, splitLine: { show: false },
        axisLine: { show: true, lineStyle: { color: colours.line } },
      })),
      yAxis: stale.map((_, at) => ({ ...linearAxis(colours, 0, top * 1.2, showShare), gridIndex: at, splitNumber: 2,
        axisLabel: { color: colours.faint, fontSize: 11, formatter: showShare, showMaxLabel: false } })),
      tooltip: tooltip(colours, {
        trigger: "item",
        formatter: ({ seriesIndex, dataIndex }) => seriesIndex >= stale.length ? "" : tooltipBox(stale[seriesIndex].method.label,
          [[null, `staleness ${names[dataIndex]}`, showShare(shares[seriesIndex][dataIndex])]]),
      }),
      series: stale.map((one, at) => ({
        type: "bar", name: one.method.label, xAxisIndex: at, yAxisIndex: at, data: shares[at], barCategoryGap: "12%",
        itemStyle: { color: lookOf(one.method).colour },
      })).concat(stale.map((one, at) => ({
        // Of its own kind, because between two bars a marker of theirs cannot stand.
        type: "custom", name: "mean", silent: true, xAxisIndex: at, yAxisIndex: at, z: 5, data: [[0, top * 1.1]],
        renderItem: (_, api) => {
          const [first, y] = api.coord([0, top * 1.1]);
          // A bar stands over the middle of its ages.
          const bars = (meanAge(one.ages) - (bin - 1) / 2) / bin;
          const x = first + Math.max(-0.5, Math.min(bins - 0.5, bars)) * api.size([1, 0])[0];
          return { type: "path", x: x - 4.5, y: y - 4.5, shape: { pathData: lookOf(one.method).path, width: 9, height: 9 },
            style: { fill: lookOf(one.method).colour } };
        },
      }))),
    };
  };
}

function stalenessSection() {
  const known = shownMethods().map((method) => ({ method, ages: agesOf(method) })).filter((one) => one.ages.length);
  const stale = known.filter((one) => one.ages[one.ages.length - 1][0] > 0);
  const fresh = known.filter((one) => !stale.includes(one)).map((one) => one.method.label);
  const freshWords = fresh.length
    ? `Between reading and applying a gradient, ${enumerate(fresh)} made no other update of the same parameters.` : "";
  if (!stale.length) {
    const words = fresh.length ? setText(kept("fresh", () => make("p")), freshWords) : null;
    return section("staleness", "How old the gradients were", "", words);
  }
  const oldest = Math.max(...stale.map((one) => one.ages[one.ages.length - 1][0]));
  const bin = Math.ceil((oldest + 1) / 40);
  const bins = Math.floor(oldest / bin) + 1;
  const chart = figure("staleness", {
    title: "Staleness of the applied gradients",
    caption: "Updates that came between reading the parameters and applying the gradient, as shares of all updates; the marker "
      + `stands over the mean. A long tail to the right asks for a smaller learning rate. ${freshWords}`,
    height: (width) => panelPlaces(stale.length, width).height,
    option: stalenessOption(stale, bin, bins),
    numbers: () => ({
      titles: ["method", "mean", "greatest", "updates", "fresh"],
      rows: known.map(({ method, ages }) => {
        const total = sum(ages.map(([, count]) => count));
        const none = ages[0][0] === 0 ? ages[0][1] / total : 0;
        return [method.label, { text: showNumber(meanAge(ages)), value: meanAge(ages) }, ages[ages.length - 1][0], total,
          { text: showShare(none), value: none }];
      }),
    }),
  });
  return section("staleness", "How old the gradients were", "", chart);
}
