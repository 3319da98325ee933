// What the methods cost on a cluster with prices: time against money, and all figures as a table.

const SPENDINGS = [["dollars", "cost", showDollars], ["joules", "energy", showJoules]];

function expensePoints() {
  const shown = new Map(shownMethods().map((method) => [method.label, method]));
  return list(state.data.expenses).filter((one) => shown.has(one.method) && isNumber(one.seconds) && isNumber(one.to_target.dollars))
    .map((one) => ({ ...one, dollars: one.to_target.dollars, look: lookOf(shown.get(one.method)) }));
}

function expenseAxis(colours, values, show, name) {
  const [low, high] = span(values);
  const axis = low > 0 && high > 12 * low ? logAxis(colours, low / 1.5, high * 1.5, show) : linearAxis(colours, 0, high * 1.15 || 1, show);
  return { ...axis, name, nameLocation: "middle" };
}

function frontOption(points) {
  return (width, colours) => ({
    grid: { left: 74, right: 24, top: 24, bottom: 48 },
    xAxis: { ...expenseAxis(colours, points.map((one) => one.seconds), showTick, timeWord()), nameGap: 28, splitNumber: width < 500 ? 3 : 6 },
    yAxis: { ...expenseAxis(colours, points.map((one) => one.dollars), (value) => `$${showTick(value)}`, "cost"), nameGap: 58 },
    tooltip: tooltip(colours, {
      trigger: "item",
      formatter: ({ seriesIndex }) => (seriesIndex === 0 ? "" : expenseTip(points[seriesIndex - 1])),
    }),
    series: [
      // Between two methods of the front nothing is known, so the line is a staircase.
      { type: "line", name: "front", step: "end", silent: true, symbol: "none", lineStyle: { color: colours.faint, type: [3, 3], width: 1.5 },
        data: points.filter((one) => one.on_front).map((one) => [one.seconds, one.dollars]).sort((one, other) => one[0] - other[0]) },
      ...points.map((one) => ({
        type: "scatter", name: one.method, symbol: one.look.symbol, symbolSize: 13, itemStyle: { color: one.look.colour },
        data: [[one.seconds, one.dollars]],
        label: { show: true, formatter: () => one.method, position: one.seconds > 0.6 * Math.max(...points.map((all) => all.seconds)) ? "left" : "right",
          color: colours.ink, fontSize: 12 },
        labelLayout: { hideOverlap: true },
      })),
    ],
  });
}

function expenseTip(one) {
  const rows = SPENDINGS.filter(([key]) => key in one.to_target).map(([key, title, show]) => [null, title, show(one.to_target[key])]);
  return tooltipBox(one.method, [[null, "time", showSeconds(one.seconds)], ...rows, [null, "beaten in both", one.on_front ? "by none" : "yes"]]);
}

function expenseTable() {
  const all = list(state.data.expenses);
  const told = SPENDINGS.filter(([key]) => key in all[0].to_target);
  const whole = told.filter(([key]) => all.some((one) => isNumber(one.in_all[key])));
  const cell = (value, show) => ({ text: show(value), value: isNumber(value) ? value : null });
  return {
    titles: ["method", "time to the target", ...told.map(([, title]) => `${title} until then`),
      ...("dollars" in all[0].to_target ? ["beaten by none in time and cost"] : []), ...whole.map(([, title]) => `${title} of the whole run`)],
    rows: all.map((one) => [one.method, cell(one.seconds, showSeconds), ...told.map(([key, , show]) => cell(one.to_target[key], show)),
      ...("dollars" in one.to_target ? [one.on_front ? "yes" : "no"] : []), ...whole.map(([key, , show]) => cell(one.in_all[key], show))]),
  };
}

function expensesSection() {
  if (!list(state.data.expenses).length || !allMethods().length) return null;
  const points = expensePoints();
  const { titles, rows } = expenseTable();
  const chart = points.length > 1 ? figure("front", {
    title: "Cost against time to the target",
    caption: "The dotted line joins the methods that no other beats in both time and cost. Down and to the left is better.",
    height: (width) => (width < 500 ? 300 : 360),
    option: frontOption(points),
    numbers: expenseTable,
  }) : null;
  return section("cost", "What it costs", state.data.economy || "", chart, table("expenses", "What each method spends", titles, rows));
}
