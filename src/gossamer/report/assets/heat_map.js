// Scores over learning rate, batch size and delay: a panel for each delay, with the score in each cell.

// From poor to good, readable in print and by the colour-blind (viridis).
const HEAT = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const CELL_HEIGHT = 24;
const NARROWEST_CELL = 34;
const PANEL_LEFT = 52;
const PANEL_TOP = 30;
const PANEL_BOTTOM = 44;

function heatColour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (HEAT.length - 1);
  const below = Math.min(Math.floor(at), HEAT.length - 2);
  const mixed = HEAT[below].map((part, index) => Math.round(part + (at - below) * (HEAT[below + 1][index] - part)));
  return `rgb(${mixed.join(",")})`;
}

// Each step of the scale divides the error, or the loss, by the same factor.
function heatValue(value, key) {
  return -Math.log10(Math.max(key === "accuracy" ? 1 - value : value, 1e-6));
}

function heatCells(map) {
  return list(map.panels).flatMap((panel) => list(panel.cells).map(([rate, batch, value, hasFailed, hasFinished]) =>
    ({ panel, rate, batch, value, hasFailed, hasFinished })));
}

function cellScore({ value, hasFailed, hasFinished }, key) {
  // How large the loss of a diverged model is says nothing.
  if (!isNumber(value) || (hasFailed && key !== "accuracy")) return MISSING;
  return (key === "accuracy" ? (100 * value).toFixed(1) : showNumber(value)) + (hasFinished ? "" : "*");
}

function showRate(rate) {
  return rate >= 0.01 && rate < 1000 ? showTick(Number(rate.toPrecision(3))) : Number(rate.toPrecision(3)).toExponential();
}

// Where a rate lies among the rows, linear in its logarithm.
function rateRow(rate, rates) {
  const above = rates.findIndex((one) => one >= rate);
  if (above <= 0 || rates.length < 2) return above === 0 && rate === rates[0] ? 0 : null;
  return above - 1 + Math.log(rate / rates[above - 1]) / Math.log(rates[above] / rates[above - 1]);
}

// As many panels side by side as leave room for the numbers.
function heatLayout(map, width) {
  const panels = list(map.panels).length;
  const least = PANEL_LEFT + map.batches.length * NARROWEST_CELL + 10;
  const across = Math.max(1, Math.min(panels, Math.floor(width / least)));
  const down = Math.ceil(panels / across);
  // Rows as even as can be.
  const columns = Math.ceil(panels / down);
  const height = PANEL_TOP + map.rates.length * CELL_HEIGHT + PANEL_BOTTOM;
  return { columns, down, height, width: width / columns };
}

function heatSeries(map, panel, at, range, colours) {
  const cells = heatCells({ panels: [panel] });
  return {
    type: "custom", name: `delay ${panel.delay}`, xAxisIndex: at, yAxisIndex: at, encode: { x: 0, y: 1 },
    data: cells.map((cell) => ({ value: [cell.batch, cell.rate], cell })),
    renderItem: (params, api) => {
      const cell = cells[params.dataIndex];
      const [x, y] = api.coord([api.value(0), api.value(1)]);
      const [wide, high] = api.size([1, 1]);
      const share = (heatValue(cell.value, map.key) - range[0]) / (range[1] - range[0]);
      const fill = cell.hasFailed || !isNumber(cell.value) ? colours.line : heatColour(share);
      const ink = cell.hasFailed || !isNumber(cell.value) ? colours.faint : share < 0.6 ? "#fff" : "#111";
      return { type: "group", children: [
        { type: "rect", shape: { x: x - wide / 2 + 0.5, y: y - high / 2 + 0.5, width: wide - 1, height: high - 1 }, style: { fill }, z2: 1 },
        { type: "text", style: { text: cellScore(cell, map.key), x, y, align: "center", verticalAlign: "middle", fill: ink, fontSize: 12, fontFamily: FONT }, z2: 9 },
      ] };
    },
  };
}

function edgeSeries(map, panel, at) {
  const row = isNumber(panel.edge) ? rateRow(panel.edge, map.rates) : null;
  if (row === null) return null;
  return {
    type: "custom", name: "predicted edge", xAxisIndex: at, yAxisIndex: at, silent: true, data: [[0, Math.floor(row)]],
    renderItem: (params, api) => {
      const [, high] = api.size([1, 1]);
      const [, y] = api.coord([0, Math.floor(row)]);
      const place = y - (row - Math.floor(row)) * high;
      const { x, width } = params.coordSys;
      return { type: "line", shape: { x1: x, y1: place, x2: x + width, y2: place }, style: { stroke: "#D55E00", lineWidth: 2.5 }, z2: 5 };
    },
  };
}

function heatOption(map) {
  const known = heatCells(map).filter((cell) => isNumber(cell.value) && !cell.hasFailed).map((cell) => heatValue(cell.value, map.key));
  const found = span(known) || [0, 1];
  const range = [found[0], Math.max(found[1], found[0] + 0.1)];
  return (width, colours) => {
    const layout = heatLayout(map, width);
    const panels = list(map.panels);
    const place = (at) => ({ left: (at % layout.columns) * layout.width, top: Math.floor(at / layout.columns) * layout.height });
    const axis = { type: "category", axisTick: { show: false }, axisLine: { show: false }, splitLine: { show: false } };
    const words = { color: colours.faint, fontSize: 12, interval: 0 };
    return {
      title: panels.map((panel, at) => ({
        text: `delay ${showTick(panel.delay)}`, left: place(at).left + PANEL_LEFT - 5, top: place(at).top, textStyle: { fontSize: 13, color: colours.ink, fontFamily: FONT },
      })),
      grid: panels.map((_, at) => ({
        left: place(at).left + PANEL_LEFT, top: place(at).top + PANEL_TOP, width: layout.width - PANEL_LEFT - 10, height: map.rates.length * CELL_HEIGHT,
      })),
      xAxis: panels.map((_, at) => ({ ...axis, gridIndex: at, data: map.batches.map(showTick), axisLabel: words, name: "batch", nameLocation: "middle", nameGap: 24,
        nameTextStyle: { color: colours.faint, fontSize: 12 } })),
      yAxis: panels.map((_, at) => ({ ...axis, gridIndex: at, data: map.rates.map(showRate), axisLabel: words })),
      tooltip: tooltip(colours, { trigger: "item", formatter: ({ data }) => (data && data.cell ? tooltipBox(
        `delay ${showTick(data.cell.panel.delay)}, batch ${showTick(map.batches[data.cell.batch])}, rate ${showRate(map.rates[data.cell.rate])}`,
        [[null, map.key, map.key === "accuracy" ? showAccuracy(data.cell.value) : showNumber(data.cell.value)]]) : "") }),
      series: panels.flatMap((panel, at) => [heatSeries(map, panel, at, range, colours), edgeSeries(map, panel, at)]).filter((one) => one),
    };
  };
}

function heatMapFigure(map, at) {
  const failed = map.key === "accuracy" ? "grey is chance level or diverged" : "grey is no better than untrained";
  const hasEdge = list(map.panels).some((panel) => isNumber(panel.edge) && rateRow(panel.edge, map.rates) !== null);
  const hasOpen = heatCells(map).some((cell) => !cell.hasFinished);
  return figure(`heat-${at}`, {
    title: `${map.optimiser}: learning rate against batch size, at each delay`,
    caption: `Each cell is the ${map.key} at the end${map.key === "accuracy" ? ", in per cent" : ""}; brighter is better, ${failed}. Learning rates upwards.`
      + (hasEdge ? " The orange line is the predicted edge of stability; where there is none, it lies outside of the grid." : "") + (hasOpen ? " A star marks what was not trained to its end." : ""),
    height: (width) => heatLayout(map, width).height * heatLayout(map, width).down,
    option: heatOption(map),
    numbers: () => ({
      titles: ["delay", "batch", "learning rate", map.key],
      rows: heatCells(map).map((cell) => [cell.panel.delay, map.batches[cell.batch], { text: showRate(map.rates[cell.rate]), value: map.rates[cell.rate] },
        { text: cellScore(cell, map.key), value: isNumber(cell.value) ? cell.value : null }]),
    }),
  });
}

function heatMapSections() {
  const maps = list(state.data.heat_maps).filter((map) => map && list(map.rates).length && list(map.batches).length && list(map.panels).length);
  return [section("heat", "Which rates survive which delay", "", maps.map(heatMapFigure))];
}
