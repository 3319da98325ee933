// Where the workers' time went: shares of each method, then worker by worker for one of them.

function waitingOf(worker) {
  return sum(Object.values(worker.waiting || {}));
}

function totalOf(worker) {
  const parts = (worker.computing || 0) + waitingOf(worker) + (worker.other || 0);
  return isNumber(worker.total) && worker.total > 0 ? worker.total : parts;
}

// Of all workers and seeds, as the data have them: table, bar and picture say the same.
function sharesOf(method) {
  const shares = method.shares;
  return shares && SHARE_KINDS.every((kind) => isNumber(shares[kind])) ? shares : null;
}

const SHARE_KINDS = ["computing", "waiting", "other"];

function shareSeries(kind, values, colours) {
  const inkOn = { computing: state.isDark ? "#000" : "#fff", waiting: "#222", other: colours.ink };
  return {
    type: "bar",
    name: kind,
    stack: "all",
    barMaxWidth: 26,
    barCategoryGap: "32%",
    // A share too small for its label has none.
    data: values.map((value) => ({ value, label: { show: value >= 0.09 } })),
    itemStyle: { ...kindLook(kind), borderColor: colours.paper, borderWidth: 1 },
    label: {
      show: true, fontSize: 11.5, color: inkOn[kind],
      backgroundColor: kindLook(kind).color, padding: [2, 4],
      formatter: ({ value }) => showShare(value),
    },
  };
}

function shareFigure() {
  const methods = rankedMethods(shownMethods().filter(sharesOf));
  if (!methods.length) return null;
  const shares = methods.map(sharesOf);
  return figure("shares", {
    title: "Computing or waiting?",
    caption: "Share of each worker's time up to its end, mean over workers and seeds. Yellow stripes are time that workers had nothing to compute and waited for "
      + `somebody; “other” is ${state.data.time === "virtual seconds" ? "mostly copying, applying and sending" : "all else that a worker does: starting, its step, copying, averaging, evaluating, being a server"}.`,
    height: () => rowsHeight(methods, 36, 66),
    option: (width, colours) => ({
      grid: { left: labelRoom(methods, width), right: 20, top: 34, bottom: 26 },
      legend: kindLegend(colours, SHARE_KINDS),
      xAxis: linearAxis(colours, 0, 1, showShare),
      yAxis: methodAxis(colours, methods, width),
      tooltip: tooltip(colours, {
        trigger: "item",
        formatter: ({ dataIndex }) => tooltipBox(methods[dataIndex].label,
          SHARE_KINDS.map((kind) => [null, kind, showShare(shares[dataIndex][kind])])),
      }),
      series: SHARE_KINDS.map((kind) => shareSeries(kind, shares.map((share) => share[kind]), colours)),
    }),
    numbers: () => ({
      titles: ["method", ...SHARE_KINDS],
      rows: methods.map((method, at) => [method.label,
        ...SHARE_KINDS.map((kind) => ({ text: showShare(shares[at][kind]), value: shares[at][kind] }))]),
    }),
  });
}

const GOODPUT_COLOURS = {
  useful: "#1b7f4d", slower: "#8fbf6a", applying: "#5a8fc7", waiting: "#e0b83c", lost: "#c7503c", absent: "#7a4a8c", other: "#9a9a9a",
};

function goodputOf(method) {
  const shares = method.goodput;
  return shares && isNumber(shares.useful) ? shares : null;
}

// Drawn where somebody died, came late or was lost work: otherwise the bars above say it all.
function goodputFigure() {
  const methods = rankedMethods(shownMethods().filter(goodputOf));
  const kinds = Object.keys(GOODPUT_COLOURS).filter((kind) => methods.some((one) => Math.abs(goodputOf(one)[kind] || 0) >= 0.0005));
  if (!methods.some((one) => (goodputOf(one).absent || 0) + (goodputOf(one).lost || 0) > 0)) return null;
  const shareOf = (method, kind) => Math.max(0, goodputOf(method)[kind] || 0);
  return figure("goodput", {
    title: "Goodput, and what took the rest",
    caption: "Share of the whole run of all workers. “useful” is the goodput: the time in which machines on which nothing goes wrong compute what was trained. "
      + "“absent” is time of dead workers and of those who had not come, “lost” the gradients that died with them, “slower” computing beyond the usual time.",
    height: () => rowsHeight(methods, 36, 66),
    option: (width, colours) => ({
      grid: { left: labelRoom(methods, width), right: 20, top: 34, bottom: 26 },
      legend: kindLegend(colours, kinds),
      xAxis: linearAxis(colours, 0, 1, showShare),
      yAxis: methodAxis(colours, methods, width),
      tooltip: tooltip(colours, {
        trigger: "item",
        formatter: ({ dataIndex }) => tooltipBox(methods[dataIndex].label,
          kinds.map((kind) => [null, kind, showShare(shareOf(methods[dataIndex], kind))])),
      }),
      series: kinds.map((kind) => ({
        type: "bar", name: kind, stack: "all", barMaxWidth: 26, barCategoryGap: "32%",
        data: methods.map((method) => ({ value: shareOf(method, kind), label: { show: shareOf(method, kind) >= 0.09 } })),
        itemStyle: { color: GOODPUT_COLOURS[kind], borderColor: colours.paper, borderWidth: 1 },
        label: { show: true, fontSize: 11.5, color: "#fff", formatter: ({ value }) => showShare(value) },
      })),
    }),
    numbers: () => ({
      titles: ["method", ...kinds],
      rows: methods.map((method) => [method.label,
        ...kinds.map((kind) => ({ text: showShare(shareOf(method, kind)), value: shareOf(method, kind) }))]),
    }),
  });
}

function causesOf(worker) {
  return Object.entries(worker.waiting || {}).filter(([, seconds]) => isNumber(seconds) && seconds > 0)
    .sort((one, other) => other[1] - one[1]);
}

function causeText(worker) {
  const causes = causesOf(worker);
  if (!causes.length) return "nobody";
  const rest = causes.length > 3 ? `, ${causes.length - 3} more` : "";
  return causes.slice(0, 3).map(([cause, seconds]) => `${cause} (${showSeconds(seconds)})`).join(", ") + rest;
}

function rowHeight(count) {
  return count <= 24 ? 20 : count <= 64 ? 12 : Math.max(3, 760 / count);
}

function workerTip(worker, rank) {
  return tooltipBox(`worker ${rank}`, [
    [null, "computing", showSeconds(worker.computing)],
    [null, "waiting", showSeconds(waitingOf(worker))],
    ...causesOf(worker).slice(0, 5).map(([cause, seconds]) => [null, `  for ${cause}`, showSeconds(seconds)]),
    [null, "other", showSeconds(worker.other)],
  ]);
}

function workerFigure(method) {
  const workers = method ? list(method.workers) : [];
  if (!workers.some((worker) => totalOf(worker) > 0)) return null;
  const part = { computing: (worker) => worker.computing || 0, waiting: waitingOf, other: (worker) => worker.other || 0 };
  return figure("workers", {
    title: `Each worker's time under ${method.label}`,
    caption: "Totals of the first seed's run. A worker with little grey and much yellow waits for others; hover to see for which.",
    height: () => workers.length * rowHeight(workers.length) + 76,
    option: (width, colours) => ({
      grid: { left: 40, right: 16, top: 34, bottom: 42 },
      legend: kindLegend(colours, SHARE_KINDS),
      xAxis: { ...linearAxis(colours, 0, niceTop(Math.max(...workers.map(totalOf)))), name: timeWord(), nameLocation: "middle", nameGap: 26, splitNumber: width < 500 ? 3 : 5 },
      yAxis: {
        type: "category", inverse: true, data: workers.map((_, rank) => String(rank)), axisTick: { show: false },
        axisLine: { lineStyle: { color: colours.line } }, axisLabel: { color: colours.faint, fontSize: 11 },
      },
      tooltip: tooltip(colours, { trigger: "item", formatter: ({ dataIndex }) => workerTip(workers[dataIndex], dataIndex) }),
      series: SHARE_KINDS.map((kind) => ({
        ...shareSeries(kind, [], colours), barCategoryGap: workers.length > 40 ? "8%" : "22%", data: workers.map(part[kind]), label: { show: false },
      })),
    }),
    numbers: () => ({
      titles: ["worker", "computing", "waiting", "other", "waited for"],
      rows: workers.map((worker, rank) => [rank,
        ...SHARE_KINDS.map((kind) => ({ text: showSeconds(part[kind](worker)), value: part[kind](worker) })), causeText(worker)]),
    }),
  });
}

function timeSection() {
  const candidates = shownMethods().filter((method) => list(method.workers).length || hasStrip(method));
  // The one that waits most has most to show.
  const waiting = (one) => (sharesOf(one) || { waiting: 0 }).waiting;
  const usual = [...candidates].sort((one, other) => waiting(other) - waiting(one))[0];
  const method = chosenMethod("time", candidates, usual);
  // Of one there is nothing to choose.
  const choice = candidates.length > 1 ? chooser("time", "Look inside", candidates.map((one) => one.label), method.label, (label) => {
    state.chosen.set("time", label);
    update();
  }) : null;
  return section("time", "Where the time went",
    `A cluster is as fast as its waiting lets it be.${allMethods().length > 1 ? " First all methods, then one of them worker by worker." : ""}`,
    shareFigure(), goodputFigure(), choice, stripFigure(method), workerFigure(method));
}
