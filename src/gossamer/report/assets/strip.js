// A stretch of a run as a Gantt strip: one row a worker, servers below, and for whom each waits.

const STRIP_WORDS = "The stripes show which worker waits, how long and, on hovering, for which worker.";
// A clock outside of the network cannot look into a wait.
const REAL_STRIP_WORDS = "Computing is a gradient; communicating is what a worker does itself for an exchange: copying, adding, "
  + "handing over; waiting is a wait for somebody (hover for whom), a message's time on its way included, as nobody there can "
  + "tell the two apart; other is all else it does: its step, averaging, evaluating, being a server.";
const STRIP_KINDS = ["computing", "communicating", "waiting", "paused"];

function segmentsOf(method) {
  const segments = method && method.strip ? list(method.strip.segments) : [];
  return segments.filter((one) => Array.isArray(one) && isNumber(one[0]) && isNumber(one[1]) && isNumber(one[2]));
}

function hasStrip(method) {
  return segmentsOf(method).length > 0;
}

function stripRows(method, segments) {
  const count = Math.max(...segments.map((one) => one[0])) + 1;
  const servers = method.strip.servers || 0;
  const workers = method.strip.workers || list(method.workers).length || Math.max(1, count - servers);
  const rows = Math.max(count, workers);
  return Array.from({ length: rows }, (_, row) => (row < workers ? `worker ${row}` : `server ${row - workers}`));
}

function kindsIn(segments) {
  return [...STRIP_KINDS, "other"].filter((kind) => segments.some((one) => kindOf(one[3]) === kind));
}

// The legend takes a second line where the screen is narrow.
function stripTop(kinds, width) {
  return kinds.length > 3 && width < 480 ? 56 : 34;
}

function stripSeries(kind, segments, colours, height) {
  const found = segments.filter((one) => kindOf(one[3]) === kind);
  const look = kindLook(kind);
  return {
    type: "custom",
    name: kind,
    clip: true,
    itemStyle: look,
    dimensions: ["from", "to", "row"],
    encode: { x: [0, 1], y: 2 },
    data: found.map((one) => ({ value: [one[1], one[2], one[0]], detail: String(one[4] || ""), kind: String(one[3]) })),
    renderItem: (_, api) => {
      const [left, y] = api.coord([api.value(0), api.value(2)]);
      const [right] = api.coord([api.value(1), api.value(2)]);
      const shape = { x: left, y: y - height / 2, width: Math.max(0.6, right - left), height };
      const edge = kind === "paused" ? { stroke: colours.faint, lineWidth: 1 } : {};
      return { type: "rect", shape, style: { fill: look.color, decal: look.decal, ...edge } };
    },
  };
}

function stripTip(names) {
  return ({ data, seriesName }) => {
    if (!data || !data.value) return "";
    const [from, to, row] = data.value;
    const rows = [[null, data.kind || seriesName, showSeconds(to - from)]];
    if (data.detail) rows.push([null, seriesName === "waiting" ? "for" : "", data.detail]);
    return tooltipBox(`${names[row]}, from ${showSeconds(from)}`, rows);
  };
}

function stripOption(method, segments, names) {
  return (width, colours) => {
    const height = rowHeight(names.length);
    const hasServers = names.some((name) => name.startsWith("server"));
    const kinds = kindsIn(segments);
    const short = (name) => (width < 520 || !hasServers ? name.replace("worker ", "").replace("server ", "S") : name);
    const top = stripTop(kinds, width);
    const ends = span(segments.flatMap((one) => [one[1], one[2]]));
    const { from, to } = method.strip;
const [first, last] = [isNumber(from) ? from : ends[0], isNumber(to) ? to : ends[1]];
    const along = evenAxis(colours, first, last, width < 500 ? 4 : 8);
    return {
      grid: { left: hasServers && width >= 520 ? 72 : 40, right: 20, top, bottom: 42 },
      legend: kindLegend(colours, kinds),
      xAxis: {
        ...along, name: timeWord(), nameLocation: "middle", nameGap: 26,
      },
      yAxis: {
        type: "category", inverse: true, data: names, axisTick: { show: false },
        axisLine: { lineStyle: { color: colours.line } },
        axisLabel: { color: colours.faint, fontSize: 11, formatter: short },
      },
      tooltip: tooltip(colours, { trigger: "item", formatter: stripTip(names) }),
      series: kinds.map((kind) => stripSeries(kind, segments, colours, height * 0.78)),
    };
  };
}

function stripFigure(method) {
  const segments = segmentsOf(method);
  if (!segments.length) return null;
  const names = stripRows(method, segments);
  return figure("strip", {
    title: `What everybody does under ${method.label}`,
    caption: `A stretch of the first seed's run, one row a worker. ${state.data.time === "virtual seconds" ? STRIP_WORDS : REAL_STRIP_WORDS}`,
    height: (width) => names.length * rowHeight(names.length) + stripTop(kindsIn(segments), width) + 42,
    option: stripOption(method, segments, names),
    numbers: () => ({
      titles: ["who", "from", "to", "what", "detail"],
      // Two hundred rows are already more than anybody reads; the run's folder has them all.
      rows: segments.slice(0, 200).map((one) => [names[one[0]], { text: showSeconds(one[1]), value: one[1] },
        { text: showSeconds(one[2]), value: one[2] }, String(one[3]), String(one[4] || "")]),
    }),
  });
}
