// Bytes on the wire: per step of a method, and on each network card, where the crowding shows.

function trafficAxis(colours, values, width) {
  const found = span(values.filter((value) => value > 0));
  if (!found) return linearAxis(colours, 0, 1, showBytesTick);
  const axis = found[1] > 30 * found[0]
    ? logAxis(colours, found[0] / 1.6, found[1] * 1.6, showBytesTick)
    : { ...linearAxis(colours, 0, found[1] * 1.08, showBytesTick), splitNumber: width < 500 ? 2 : 5 };
  axis.axisLabel = { ...axis.axisLabel, showMaxLabel: axis.type === "log" ? null : false };
  return axis;
}

function bytesFigure() {
  const methods = shownMethods().filter((method) => figureOf(method, "bytes_per_step") !== null)
    .sort((one, other) => figureOf(one, "bytes_per_step") - figureOf(other, "bytes_per_step"));
  if (!methods.length) return null;
  const values = methods.map((method) => figureOf(method, "bytes_per_step"));
  return figure("bytes", {
    title: "Bytes per gradient step",
    caption: "All bytes put on network cards, divided by the gradient steps of all workers. Least first.",
    height: () => rowsHeight(methods, 36, 46),
    option: (width, colours) => {
      const room = labelRoom(methods, width);
      return {
        grid: { left: room, right: 74, top: 4, bottom: 30 },
        xAxis: { ...linearAxis(colours, 0, Math.max(...values) || 1, showBytesTick), splitNumber: width < 500 ? 2 : 4 },
        yAxis: methodAxis(colours, methods, width),
        tooltip: tooltip(colours, {
          trigger: "item",
          formatter: ({ dataIndex }) => tooltipBox(methods[dataIndex].label, [[null, "per step", showBytes(values[dataIndex])]]),
        }),
        series: [{
          type: "bar", name: "bytes per step", barMaxWidth: 24, barCategoryGap: "36%",
          data: methods.map((method, at) => ({ value: values[at], itemStyle: { color: lookOf(method).colour } })),
          label: { show: true, position: "right", color: colours.ink, fontSize: 12.5, formatter: ({ value }) => showBytes(value) },
        }],
      };
    },
    numbers: () => ({
      titles: ["method", "bytes per step"],
      rows: methods.map((method, at) => [method.label, { text: showBytes(values[at]), value: values[at] }]),
    }),
  });
}

function cardsOf(method) {
  return list(method.cards).filter((card) => card && (isNumber(card.sent) || isNumber(card.received)));
}

function isServerCard(card) {
  return String(card.name).startsWith("server");
}

const CARD_MARKS = [
  { name: "a worker sends", part: "sent", isServer: false, symbol: "circle" },
  { name: "a worker receives", part: "received", isServer: false, symbol: "emptyCircle" },
  { name: "a server sends", part: "sent", isServer: true, symbol: "diamond" },
  { name: "a server receives", part: "received", isServer: true, symbol: "emptyDiamond" },
];

// Sent above the row's middle and received below: equal amounts stay two marks.
function cardSeries(mark, methods, colours) {
  const points = methods.flatMap((method, row) => cardsOf(method)
    .filter((card) => isServerCard(card) === mark.isServer && card[mark.part] > 0)
    .map((card) => ({
      value: [card[mark.part], row],
      card: String(card.name),
      itemStyle: { color: mark.symbol.startsWith("empty") ? colours.paper : lookOf(method).colour, borderColor: lookOf(method).colour },
    })));
  return {
    type: "scatter",
    name: mark.name,
    symbol: mark.symbol.replace("emptyCircle", "circle").replace("emptyDiamond", "diamond"),
    symbolSize: mark.isServer ? 15 : 10,
    symbolOffset: [0, mark.part === "sent" ? -6 : 6],
    itemStyle: { color: mark.symbol.startsWith("empty") ? colours.paper : colours.faint, borderColor: colours.faint, borderWidth: 1.5,
      opacity: 0.9 },
    data: points,
  };
}

function cardsFigure() {
  const methods = shownMethods().filter((method) => cardsOf(method).length);
  if (!methods.length) return null;
  const values = methods.flatMap((method) => cardsOf(method).flatMap((card) => [card.sent, card.received])).filter(isNumber);
  return figure("cards", {
    title: "Bytes per step on each network card",
    caption: "One mark a card: filled marks send, hollow ones receive, diamonds are servers. A mark far to the right of the others is "
      + "the card that everybody queues for.",
    height: (width) => rowsHeight(methods, 36, width < 480 ? 96 : 76),
    option: (width, colours) => {
      const series = CARD_MARKS.map((mark) => cardSeries(mark, methods, colours)).filter((one) => one.data.length);
      return {
        grid: { left: labelRoom(methods, width), right: 20, top: width < 480 ? 60 : 34, bottom: 30 },
        legend: { ...kindLegend(colours, series.map((one) => one.name)), icon: null, itemWidth: 14, itemGap: 12 },
        xAxis: trafficAxis(colours, values, width),
        yAxis: { ...methodAxis(colours, methods, width), splitLine: { show: true, lineStyle: { color: colours.line } } },
        tooltip: tooltip(colours, {
          trigger: "item",
          formatter: ({ data, seriesName }) => tooltipBox(`${data.card}, ${methods[data.value[1]].label}`,
            [[null, seriesName.split(" ").pop(), `${showBytes(data.value[0])} per step`]]),
        }),
        series,
      };
    },
    numbers: () => ({
      titles: ["method", "card", "sent per step", "received per step"],
      rows: methods.flatMap((method) => cardsOf(method).map((card) => [method.label, String(card.name),
        ...["sent", "received"].map((part) => ({ text: showBytes(card[part]), value: isNumber(card[part]) ? card[part] : null }))])),
    }),
  });
}

function trafficSection() {
  return section("traffic", "What the network carried", "", columns("traffic", bytesFigure(), cardsFigure()));
}
