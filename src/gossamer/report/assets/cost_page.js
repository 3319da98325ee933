// The page of `gossamer cost --page`: a sentence that answers, sliders, and what follows from them.

// A figure over one slider: from `reach` times less to as many times more than its value. `drawn` is
// what a chart multiplies it by, as its ticks are round numbers of bits.
const AXES = [
  { name: "bandwidth", title: "bandwidth", reach: 100, drawn: 8, show: (value) => withUnit(value, RATES) },
  { name: "workers", title: "number of workers", drawn: 1, unit: " workers", show: String },
  { name: "parameters", title: "model size", reach: 100, drawn: 1, unit: " parameters", show: (value) => withUnit(value, COUNTS) },
  { name: "batch", title: "batch", reach: 64, drawn: 1, show: (value) => showTick(Math.round(value)) },
  { name: "latency", title: "latency", reach: 1000, drawn: 1, show: (value) => withUnit(value, DURATIONS) },
];
const POINTS = 49;
const MOST_CROSSINGS = 8;
const ONE_STEP = [["computing", "computing", "compute_s"], ["waiting for slower ones", "waiting", "waiting_s"],
  ["sending, not hidden", "communicating", "exposed_s"], ["queueing at cards", "paused", "queueing_s"]];

let model = null;
let current = new Map(); // label -> what a step takes at the values of the sliders

function answers() {
  return allMethods().map((method) => ({ method, ...current.get(method.label) }));
}

function known(all) {
  return all.filter((one) => !one.refused).sort((one, other) => other.speed - one.speed);
}

function waits(one) {
  return 1 - one.computing;
}

function times(ratio) {
  return ratio >= 99.5 ? showNumber(Math.round(ratio)) : Number(ratio.toPrecision(3)).toString();
}

function shareOf(one) {
  const percent = 100 * waits(one);
  if (percent > 99 && percent < 100) return "over 99 %";
  return percent > 0.05 && percent < 1 ? "under 1 %" : `${percent.toFixed(0)} %`;
}

function setting() {
  const shown = (name) => SLIDERS.find((one) => one.name === name).show(values[name]);
  return `With ${shown("bandwidth")}, ${plural(values.workers, "worker")} and ${shown("parameters")} parameters`;
}

// The reference is the method that everybody knows, where the page has it.
function reference(all) {
  return all.find((one) => one.method.name === "all_reduce") || all[all.length - 1];
}

function answer() {
  const all = known(answers().filter((one) => fits(one) !== false));
  if (!all.length) return `${setting()} no method has an answer here: ${(answers()[0] || {}).refused || "none fits into a worker"}.`;
  const [usual, best] = [reference(all), all[0]];
  const told = `${setting()} ${usual.method.label} ${waits(usual) < 5e-4 ? "never waits" : `waits ${shareOf(usual)} of each step`}`;
  const level = all.filter((one) => one.speed >= best.speed * (1 - state.data.tie)).map((one) => one.method.label);
  const alone = model.speedAlone(values);
  if (values.workers > 1 && best.speed < alone) return `${told}, and one worker alone is faster than any of these methods.`;
  if (level.includes(usual.method.label)) {
    return all.length > level.length ? `${told}; no method is faster${level.length > 1 ? `, ${enumerate(level.filter((one) => one !== usual.method.label).slice(0, 3))} as fast` : ""}.` : `${told}; all methods are as fast.`;
  }
  const who = level.length > 3 ? `${level.length} methods are the fastest` : level.length > 1 ? `the fastest are ${enumerate(level)}` : `the fastest is ${level[0]}`;
  return `${told}; ${who}, with ${times(best.speed / usual.speed)} times as many samples per second.`;
}

function shortAnswer() {
  const all = known(answers().filter((one) => fits(one) !== false));
  if (!all.length) return "No answer here.";
  const best = all[0];
  return `Fastest: ${best.method.label}, ${times(best.speed / model.speedAlone(values))} times one worker, ${showSeconds(best.step)} a step.`;
}

// ------------------------------------------------------------------ memory and money

// Whether it fits; null where nobody knows what there is.
function fits(one) {
  const memory = model.memory(one.method, values);
  return memory && memory.has ? memory.bytes <= memory.has : null;
}

function memoryCell(one) {
  const memory = model.memory(one.method, values);
  if (!memory) return null;
  const over = memory.has ? memory.bytes - memory.has : 0;
  return { text: `${showBytes(memory.bytes)}${over > 0 ? `, ${showBytes(over)} too many` : ""}`, value: memory.bytes, style: over > 0 ? "lacking" : "" };
}

function resultsTable() {
  const alone = model.speedAlone(values);
  const all = answers().filter((one) => !state.hidden.has(one.method.label));
  const columns = [
    ["one step", (one) => ({ text: showSeconds(one.step), value: one.step })],
    ["of it waiting", (one) => ({ text: shareOf(one), value: waits(one) })],
    ["samples per second", (one) => ({ text: showNumber(one.speed), value: one.speed })],
    ["times one worker", (one) => ({ text: times(one.speed / alone), value: one.speed / alone })],
    ["an epoch", (one) => ({ text: showLong(model.epoch(values, one).seconds), value: model.epoch(values, one).seconds })],
  ];
  const price = state.data.price;
  if (price && price.has_dollars) columns.push(["dollars an epoch", (one) => ({ text: showDollars(model.epoch(values, one).dollars), value: model.epoch(values, one).dollars })]);
  if (price && price.has_watts) columns.push(["energy an epoch", (one) => ({ text: showJoules(model.epoch(values, one).joules), value: model.epoch(values, one).joules })]);
  if (state.data.room) columns.push([state.data.room.has ? `memory, of ${showBytes(state.data.room.has)}` : "memory of a worker", memoryCell]);
  const first = known(all)[0];
  const rows = [...known(all), ...all.filter((one) => one.refused)].map((one) => [
    { text: one.method.label, node: () => make("span", { class: "method" }, swatch(lookOf(one.method)), make("span", { class: one === first ? "chosen" : null }, one.method.label)) },
    ...columns.map(([, cell]) => (one.refused ? null : cell(one))),
  ]);
  return { titles: ["method", ...columns.map(([title]) => title)], rows };
}

// Epochs of large data take days.
function showLong(seconds) {
  const found = [["days", 86400 * 2], ["h", 3600 * 2], ["min", 120]].find(([, least]) => seconds >= least);
  if (!found) return showSeconds(seconds);
  return `${showNumber(seconds / { days: 86400, h: 3600, min: 60 }[found[0]])} ${found[0]}`;
}

function remarks() {
  const said = new Map();
  for (const one of answers().filter((all) => !state.hidden.has(all.method.label))) {
    for (const line of one.refused ? [one.refused] : one.notes) said.set(line, [...(said.get(line) || []), one.method.label]);
  }
  const element = kept("remarks", () => make("ul", { class: "notes" }));
  element.replaceChildren(...[...said].map(([line, whose]) =>
    make("li", null, whose.some((label) => line.startsWith(label)) ? line : `${enumerate(whose)}: ${line}`)));
  element.hidden = !said.size;
  return element;
}

function resultsSection() {
  const { titles, rows } = resultsTable();
  const without = state.data.room && !state.data.room.activations.length ? " Memory is without activations." : "";
  return section("results", "Each method", `Every worker keeps its batch. How well a method learns per sample is not in these figures: methods that average seldom are fast here and may need more samples.${without}`,
    rows.length ? table("results", "What each method takes", titles, rows) : null, remarks(), partsFigure());
}

// ------------------------------------------------------------------ where a step goes

// Computing is the mean worker's; the others share the rest as they share a waiting worker's step.
function shareParts(one) {
  const rest = sum(ONE_STEP.slice(1).map(([, , key]) => one.parts[key]));
  return ONE_STEP.map(([, , key], at) => (at === 0 ? one.computing : rest ? ((1 - one.computing) * one.parts[key]) / rest : 0));
}

function partsFigure() {
  const all = known(answers().filter((one) => !state.hidden.has(one.method.label)));
  if (!all.length) return null;
  const [methods, names, shares] = [all.map((one) => one.method), ONE_STEP.map(([name]) => name), all.map(shareParts)];
  return figure("parts", {
    title: "Where a step goes",
    caption: "Shares of the mean worker's time; to the right is the time of one step. What computing hides is not seen here.",
    height: (width) => rowsHeight(methods, 34, width < 520 ? 96 : 70),
    option: (width, colours) => ({
      grid: { left: labelRoom(methods, width), right: 76, top: width < 520 ? 58 : 34, bottom: 26 },
      legend: { ...kindLegend(colours, names), itemGap: 14 },
      xAxis: { ...linearAxis(colours, 0, 1, showShare), splitNumber: width < 520 ? 2 : 5 },
      yAxis: [methodAxis(colours, methods, width), {
        ...methodAxis(colours, methods, width), position: "right", data: all.map((one) => showSeconds(one.step)), axisLine: { show: false },
        axisLabel: { color: colours.ink, fontSize: 12, interval: 0 },
      }],
      tooltip: tooltip(colours, { trigger: "item", formatter: ({ dataIndex }) => tooltipBox(methods[dataIndex].label,
        [...names.map((name, at) => [null, name, showShare(shares[dataIndex][at])]), [null, "one step", showSeconds(all[dataIndex].step)]]) }),
      series: ONE_STEP.map(([name, kind], at) => ({
        type: "bar", name, stack: "all", barMaxWidth: 22, barCategoryGap: "32%", data: shares.map((share) => share[at]),
        itemStyle: { ...kindLook(kind), borderColor: colours.paper, borderWidth: 1 },
      })),
    }),
    numbers: () => ({
      titles: ["method", ...names, "one step"],
      rows: all.map((one, row) => [one.method.label, ...names.map((_, at) => ({ text: showShare(shares[row][at]), value: shares[row][at] })), { text: showSeconds(one.step), value: one.step }]),
    }),
  });
}

// ------------------------------------------------------------------ over one slider

function chosenAxis() {
  return AXES.find((one) => one.name === state.chosen.get("axis")) || AXES[0];
}

function gridOver(axis) {
  if (axis.name === "workers") return state.data.counts;
  const middle = Math.max(values[axis.name], axis.name === "latency" ? 1e-7 : 1e-300);
  const grid = py.range(POINTS).map((at) => middle * axis.reach ** ((2 * at) / (POINTS - 1) - 1));
  return axis.name === "batch" ? [...new Set(grid.map((value) => Math.max(1, Math.round(value))))] : grid;
}

// Against one worker with the same values, so that each method shows what the others are worth.
function linesOver(axis) {
  const [grid, speed] = [gridOver(axis), model.speedOver(axis.name, values)];
  return shownMethods().map((method) => ({
    method,
    points: grid.map((value) => ({ x: value, y: speed(method.label, value) / model.speedAlone({ ...values, [axis.name]: value }) }))
      .filter((point) => point.y > 0),
  })).filter((one) => one.points.length > 1);
}

function overFigure(axis) {
  const curves = linesOver(axis);
  if (!curves.length) return null;
  const [low, high] = span(curves.flatMap((one) => one.points.map((point) => point.x * axis.drawn)));
  const [lowest, most] = span(curves.flatMap((one) => one.points.map((point) => point.y)));
  // What is a thousand times slower than the best is not looked at.
  const least = Math.max(lowest, most / 1000);
  const tick = (value) => axis.show(value / axis.drawn);
  const drawn = curves.map((one) => ({ ...one, points: one.points.map(({ x, y }) => ({ x: x * axis.drawn, y })) }));
  return figure("over", {
    title: `Times one worker, over the ${axis.title}`,
    caption: "The dashed line is where the sliders stand; all else is as they say. Where two lines cross, the better choice changes.",
    height: (width) => (width < 520 ? 320 : 400),
    option: (width, colours) => ({
      grid: { left: 8, right: 20, top: 14, bottom: 26, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      xAxis: roomyAxis(logAxis(colours, low, high, tick), width < 520 ? 4 : 8),
      yAxis: most > 12 * least ? logAxis(colours, least / 1.15, most * 1.15) : linearAxis(colours, 0, niceTop(most)),
      tooltip: tooltip(colours, {
        trigger: "axis",
        axisPointer: { type: "line", snap: false, lineStyle: { color: colours.faint, type: "dashed" }, label: { show: false } },
        formatter: overTip(curves, axis),
      }),
      series: [...drawn.flatMap((one) => lineSeries(one.method, one.points, placeOf(one.method), allMethods().length)), {
        type: "line", name: "here", data: [], silent: true,
        markLine: { silent: true, symbol: "none", lineStyle: { color: colours.ink, type: [5, 4], width: 1.3 }, label: { show: false },
          data: [{ xAxis: Math.max(values[axis.name] * axis.drawn, low) }, {
            yAxis: 1, lineStyle: { color: colours.faint, type: "solid", width: 1 },
            label: { show: true, formatter: "one worker", position: "insideStartTop", color: colours.faint, fontSize: 12 },
          }] },
      }],
    }),
    numbers: () => ({
      titles: [axis.title, ...curves.map((one) => one.method.label)],
      rows: gridOver(axis).filter((_, at) => axis.name === "workers" || at % 4 === 0).map((value) => [
        { text: roundly(axis, value), value },
        ...curves.map((one) => {
          const found = one.points.find((point) => point.x === value);
          return found ? { text: times(found.y), value: found.y } : null;
        })]),
    }),
  });
}

// Ticks with units are long: so many of them at most.
function roomyAxis(axis, most) {
  const all = axis.axisLabel.customValues;
  const ticks = all.filter((_, at) => at % Math.ceil(all.length / most) === 0);
  return { ...axis, axisLabel: { ...axis.axisLabel, customValues: ticks }, splitLine: { ...axis.splitLine, customValues: ticks } };
}

function overTip(curves, axis) {
  return (params) => {
    const at = list(params).length ? params[0].axisValue : null;
    if (!isNumber(at)) return "";
    const rows = curves.map((one) => ({ method: one.method, value: valueNear(one.points, at / axis.drawn) })).filter((one) => isNumber(one.value))
      .sort((one, other) => other.value - one.value);
    return tooltipBox(roundly(axis, at / axis.drawn), rows.map((one) => [swatch(lookOf(one.method)), one.method.label, times(one.value)]));
  };
}

// A value of an axis with three digits, of the unit in which it is shown.
function roundly(axis, value) {
  return axis.show(axis.name === "workers" ? Math.round(value) : Number((value * axis.drawn).toPrecision(3)) / axis.drawn);
}

function valueNear(points, x) {
  const best = points.reduce((one, other) => (Math.abs(Math.log(other.x / x)) < Math.abs(Math.log(one.x / x)) ? other : one));
  return best.y;
}

// ------------------------------------------------------------------ crossings

function crossingRows(axis) {
  const labels = shownMethods().map((one) => one.label);
  const [grid, speed] = [gridOver(axis).filter((_, at) => axis.name === "workers" || at % 3 === 0), model.speedOver(axis.name, values)];
  const top = (value) => Math.max(...labels.map((label) => speed(label, value) || 0));
  return model.crossings(axis.name, labels, grid, values).map((one) => ({
    ...one, leads: speed(one.faster, one.value) >= top(one.value) * (1 - state.data.tie),
  }));
}

function crossingSentence(rows, axis) {
  const here = values[axis.name];
  const leads = rows.filter((one) => one.leads);
  if (!rows.length) return `No method overtakes another between ${roundly(axis, gridOver(axis)[0])} and ${roundly(axis, gridOver(axis).at(-1))}.`;
  const shown = (one) => `${roundly(axis, one.value)}${axis.unit || ""}`;
  const next = leads.find((one) => one.value > here);
  const last = leads.filter((one) => one.value <= here).at(-1);
  const said = [last ? `below ${shown(last)} ${last.slower} is ahead of ${last.faster}` : "", next ? `from ${shown(next)} on ${next.faster} overtakes ${next.slower} and leads` : ""].filter(Boolean).join(", ");
  return said ? `${said[0].toUpperCase()}${said.slice(1)}.` : `${plural(rows.length, "time")} the order changes, and the lead stays.`;
}

function crossingSection() {
  const axis = chosenAxis();
  const choice = chooser("axis", "Over", AXES.map((one) => one.title), axis.title, (title) => {
    state.chosen.set("axis", AXES.find((one) => one.title === title).name);
    writeAddress();
    update();
  });
  const rows = crossingRows(axis);
  const made = rows.length ? table(`crossings ${axis.name}`, "Where one method overtakes another", [`from this ${axis.title} on`, "is faster", "than", "and leads"],
    rows.map((one) => [{ text: roundly(axis, one.value), value: one.value }, one.faster, one.slower, one.leads ? "yes" : "no"])) : null;
  return section("crossings", "Where the answer changes", crossingSentence(rows, axis), choice, overFigure(axis),
    rows.length > MOST_CROSSINGS ? folded("crossings", "Show every change of the order", made) : made);
}

// ------------------------------------------------------------------ the page

function command() {
  const short = (text) => text.replace(/\/s$/, "").replaceAll(" ", "").replace("µ", "u");
  const shown = (name) => short(SLIDERS.find((one) => one.name === name).show(values[name]));
  const names = allMethods().map((one) => (values.period === OWN_PERIOD || !one.periods.length ? one.label
    : one.periods.reduce((text, name) => `${text}${text.includes(":") ? "," : ":"}${name}=${values.period}`, one.label.replace(/(period|n_push|n_fetch)=\d+,?/g, "").replace(/[:,]$/, ""))));
  return `${state.data.base} --model-bytes ${Math.round(model.modelBytes(values))} --workers ${values.workers} --bandwidth ${shown("bandwidth")} `
    + `--latency ${shown("latency")} --compute ${short(withUnit(model.gradientSeconds(values), DURATIONS))} --batch ${values.batch} --methods "${names.join(" ")}"`;
}

function header() {
  const element = kept("header", () => make("header", null,
    make("div", { class: "above" }, make("p", { class: "kind" }, "gossamer cost"), themeButton()),
    make("h1"), make("p", { class: "title" }, make("span", { class: "name" }, state.data.title), make("span", null, state.data.subtitle))));
  themeButton();
  const heading = element.children[1];
  setText(heading, keepUnits(answer()).replace(/(\d) (?=[TGM]bit|[kMGT] par)/g, "$1\u00a0"));
  heading.classList.toggle("long", heading.textContent.length > 90);
  return element;
}

function footer() {
  return kept("footer", () => make("footer", null, make("p", null,
    `Made by gossamer ${state.data.version}. The figures are closed forms for equal workers; nothing is simulated. This page contains all its data and contacts no server. Charts by Apache ECharts.`)));
}

function update() {
  const before = new Set(usedFigures);
  usedFigures.clear();
  current = new Map(allMethods().map((method) => [method.label, model.step(method, values)]));
  const panel = slidersPanel();
  setText(panel.querySelector(".told"), shortAnswer());
  const main = arrange(kept("main", () => make("main")), [notices(), nothingShown(), resultsSection(),
    crossingSection(), section("ask", "Ask the command", "The same question, answered with what has no closed form simulated.", commandBlock("ask", command()))]);
  const body = arrange(kept("body", () => make("div", { class: "plan" })), [panel, rightSide(main)]);
  arrange(document.getElementById("page"), [header(), body, footer()]);
  dropUnused(before);
  drawFigures();
  hintAtMore();
}

function rightSide(main) {
  return arrange(kept("right", () => make("div", { class: "right" })), [legendHint(), legend(), main]);
}

function start() {
  state.data = JSON.parse(document.getElementById("data").textContent);
  model = new CostModel(state.data);
  document.title = state.data.title;
  readAddress();
  keepLooks();
  update();
  window.addEventListener("hashchange", () => {
    readAddress();
    update();
  });
}

start();
