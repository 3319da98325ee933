// Who descends from whom in a population: one row a worker, one colour for each first ancestor.

function lineageOf(method) {
  const lineage = method && method.lineage;
  return lineage && list(lineage.lives).length ? lineage : null;
}

function lineageColour(root) {
  return COLOURS[root % COLOURS.length];
}

function livesOf(lineage, root, height) {
  return {
    type: "custom",
    name: `worker ${root}`,
    clip: true,
    itemStyle: { color: lineageColour(root) },
    dimensions: ["from", "to", "row"],
    encode: { x: [0, 1], y: 2 },
    data: lineage.lives.filter((one) => one[3] === root).map((one) => ({ value: [one[1], one[2], one[0]], words: one[4] })),
    renderItem: (_, api) => {
      const [left, y] = api.coord([api.value(0), api.value(2)]);
      const [right] = api.coord([api.value(1), api.value(2)]);
      // A gap at the end of a life shows where the next one begins.
      const shape = { x: left, y: y - height / 2, width: Math.max(1, right - left - 1), height };
      return { type: "rect", shape, style: { fill: lineageColour(root) } };
    },
  };
}

function copiesOf(lineage, colours) {
  return {
    type: "custom",
    name: "copies",
    silent: true,
    clip: true,
    dimensions: ["at", "parent", "child"],
    encode: { x: 0, y: [1, 2] },
    data: lineage.copies.map(([at, parent, child]) => [at, parent, child]),
    renderItem: (_, api) => {
      const [x, from] = api.coord([api.value(0), api.value(1)]);
      const [, to] = api.coord([api.value(0), api.value(2)]);
      return { type: "line", shape: { x1: x, y1: from, x2: x, y2: to }, style: { stroke: colours.ink, lineWidth: 1, opacity: 0.55 } };
    },
  };
}

function lineageTip(names) {
  return ({ data, seriesName }) => (!data || !data.value ? "" : tooltipBox(`${names[data.value[2]]}, from ${showSeconds(data.value[0])}`,
    [[null, "descends from", seriesName], [null, "settings", data.words || ""]]));
}

function lineageOption(lineage, names) {
  return (width, colours) => {
    const height = rowHeight(names.length) * 0.6;
    const roots = [...new Set(lineage.lives.map((one) => one[3]))].sort((one, other) => one - other);
    const [first, last] = span(lineage.lives.flatMap((one) => [one[1], one[2]]));
    return {
      grid: { left: 72, right: 20, top: 12, bottom: 42 },
      xAxis: { ...evenAxis(colours, first, last, width < 500 ? 4 : 8), name: timeWord(), nameLocation: "middle", nameGap: 26 },
      yAxis: {
        type: "category", inverse: true, data: names, axisTick: { show: false },
        axisLine: { lineStyle: { color: colours.line } }, axisLabel: { color: colours.faint, fontSize: 11 },
      },
      tooltip: tooltip(colours, { trigger: "item", formatter: lineageTip(names) }),
      series: [...roots.map((root) => livesOf(lineage, root, height)), copiesOf(lineage, colours)],
    };
  };
}

function lineageSection() {
  const method = shownMethods().find(lineageOf);
  if (!method) return section("lineage", "Who descends from whom", "", null);
  const lineage = lineageOf(method);
  const names = Array.from({ length: lineage.workers }, (_, row) => `worker ${row}`);
  const chart = figure("lineage", {
    title: `The lineage under ${method.label}`,
    caption: "One row a worker, in the first seed's run. A line leads from the worker that was copied to the one that goes on with "
      + "its model and changed settings; a colour stands for all that descends from one beginning. On hovering: the settings, as "
      + "factors on what was asked for.",
    height: () => names.length * rowHeight(names.length) + 54,
    option: lineageOption(lineage, names),
    numbers: () => ({
      titles: ["worker", "from", "to", "descends from", "settings"],
      rows: lineage.lives.slice(0, 200).map((one) => [names[one[0]], { text: showSeconds(one[1]), value: one[1] },
        { text: showSeconds(one[2]), value: one[2] }, `worker ${one[3]}`, one[4]]),
    }),
  });
  return section("lineage", "Who descends from whom", "", chart);
}
