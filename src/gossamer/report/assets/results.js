// Tables: what each method reached, the learning rates tried, settings, and tables of other commands.

// Two tables, because one of all columns is wider than a screen.
const RESULT_COLUMNS = [
  ["metric", "final metric", showNumber],
  ["accuracy", "final accuracy", showAccuracyCell],
  ["loss", "final loss", showNumber],
  ["seconds", "run time", showSeconds],
  ["waiting_fraction", "waiting", showShare],
  ["mean_staleness", "mean staleness", showNumber],
  ["bytes_per_step", "bytes per step", showBytes],
];
const FURTHER_COLUMNS = [
  ["max_staleness", "greatest staleness", showCount],
  ["mean_global_staleness", "updates of all meanwhile", showNumber],
  ["exchanges_per_step", "exchanges per step", showNumber],
  ["consensus_distance", "consensus distance", showNumber],
  ["noise_scale", "noise scale in samples", showNumber],
  ["compression_ratio", "times fewer bytes", showNumber],
  ["coding_seconds_per_step", "encoding and decoding a step", showSeconds],
  ["residual_norm", "not sent yet (norm)", showNumber],
  ["displacement_cosine", "cosine of displacements", showNumber],
  ["bubble_fraction", "bubbles of pipelines", showShare],
  ["steps", "steps", showCount],
  ["wall_seconds", "took to compute", showSeconds],
];

// A long name breaks between its options before it breaks anywhere else.
function breakable(label) {
  return make("span", null, label.split(/(?<=[:,])/).flatMap((part, at) => (at ? [make("wbr"), part] : [part])));
}

function methodName(method) {
  return { text: method.label, value: method.label,
    node: () => make("span", { class: "method" }, swatch(lookOf(method)), breakable(method.label)) };
}

function arrivalCell(method) {
  const arrival = method.arrival || {};
  if (!isNumber(arrival.mean)) return { text: method.arrival ? arrivalText(method, 0) : MISSING, value: null };
  const hasSpan = isNumber(arrival.low) && isNumber(arrival.high) && arrival.high > arrival.low;
  const around = hasSpan ? ` (${showNumber(arrival.low)}–${showNumber(arrival.high)})` : "";
  return { text: showSeconds(arrival.mean) + around, value: arrival.mean };
}

function timesCell(method) {
  const times = (method.arrival || {}).times;
  return isNumber(times) ? { text: `${times.toFixed(1)}${isOpen(method) ? ", too close to call" : ""}`, value: times } : null;
}

// What a run that was stopped at its target was at the end says nothing.
const STOPPED_LESS = new Set(["metric", "accuracy", "loss", "seconds", "steps", "wall_seconds"]);

function resultsSection() {
  const methods = rankedMethods(allMethods());
  if (!methods.length) return null;
  const hasTarget = isNumber(state.data.target) && methods.some((method) => method.arrival);
  const hasRates = methods.some((method) => isNumber(method.learning_rate));
  const first = [
    ...(hasTarget ? [[`to ${showScore(state.data.target, state.data.score)}`, arrivalCell]] : []),
    ...figureColumns(RESULT_COLUMNS, methods),
    ...(hasRates ? [["learning rate", (method) => (isNumber(method.learning_rate) ? method.learning_rate : null)]] : []),
    ["status", (method) => method.status || null],
  ];
  const second = [
    ...(hasTarget ? [["times the first", timesCell]] : []),
    ...figureColumns(FURTHER_COLUMNS, methods),
    ["seeds", (method) => (isNumber(method.seeds) ? method.seeds : null)],
    ["scores are of", (method) => method.output || null],
  ];
  const around = hasTarget && state.data.can_tell ? " In parentheses are 95 % intervals of the mean of logarithms, chance pooled over the methods." : "";
  return section("results", "All results", `Press a heading to sort by it. What else was measured stands in the second table.${around}`,
    methodTable("results", "Results of each method", methods, first),
    methodTable("further results", "Further figures of each method", methods, second));
}

// Those columns in which some method has a figure.
function figureColumns(columns, methods) {
  const isStopped = state.data.kind === "advise";
  return columns.filter(([key]) => !(isStopped && STOPPED_LESS.has(key)) && methods.some((method) => figureOf(method, key) !== null)).map(([key, title, show]) =>
    [key === "metric" ? `final ${state.data.score}` : title, (method) => ({ text: show(figureOf(method, key)), value: figureOf(method, key) })]);
}

function methodTable(name, caption, methods, columns) {
  const rows = methods.map((method) => [methodName(method), ...columns.map(([, cell]) => cell(method))]);
  return table(name, caption, ["method", ...columns.map(([title]) => title)], rows);
}

function gridSection() {
  const grid = state.data.grid;
  if (!grid || !list(grid.rows).length || !list(grid.rates).length) return null;
  const show = state.data.score === "accuracy" ? showAccuracyCell : showNumber;
  const rows = grid.rows.map((row) => [String(row.method), ...grid.rates.map((_, at) => {
    const [seconds, value] = [list(row.seconds)[at], list(row.values)[at]];
    const isChosen = row.chosen === at;
    const text = isNumber(seconds) ? showSeconds(seconds) : isNumber(value) ? `(${show(value)})` : MISSING;
    return { text: (isChosen ? "● " : "") + text, value: isNumber(seconds) ? seconds : null, style: isChosen ? "chosen" : "" };
  })]);
  return section("rates", "Learning rates tried",
    "Every method got the same grid, and one rate more where its best was at the edge. Time to the target; in parentheses the "
      + `final ${state.data.score} where it was not held. The dot marks the rate of this page: in a comparison it was chosen on a seed that is not ranked.`,
    table("rates", "Time to the target at each learning rate", ["method", ...grid.rates.map((rate) => `rate ${showTick(rate)}`)], rows));
}

const MOST_ROWS = 24;

function furtherTable(name, one) {
  const rows = list(one.rows);
  const made = table(`further ${name}`, one.title || "Table", one.columns.map(String), rows);
  return rows.length > MOST_ROWS ? folded(`table ${name}`, `Show ${plural(rows.length, "row")}`, made) : made;
}

function furtherTables() {
  return list(state.data.tables).filter((one) => one && list(one.columns).length).map((one, at) =>
    section(`table-${at}`, one.title || "Table", "", furtherTable(at, one)));
}

function picturesSection() {
  const pictures = list(state.data.pictures).filter((one) => one && one.png).map((one, at) => {
    const element = kept(`picture ${at}`, () => make("figure", { class: "picture" }, make("h3"), make("img")));
    const [heading, image] = element.children;
    setText(heading, one.title || "");
    image.alt = one.alt || one.title || "";
    const source = `data:image/png;base64,${one.png}`;
    if (image.src !== source) image.src = source;
    return element;
  });
  return section("pictures", "Pictures", "", pictures);
}

function settingsSection() {
  const settings = list(state.data.settings);
  if (!settings.length) return null;
  return section("settings", "All settings", "", folded("settings", `Show ${plural(settings.length, "setting")}`,
    table("settings", "All settings", ["setting", "value"], settings.map((one) => [String(one.name), String(one.value)]))));
}

function commandSection() {
  if (!state.data.command) return null;
  const isSimulated = state.data.time === "virtual seconds";
  return section("reproduce", "Reproduce it", isSimulated ? "In virtual time the same command gives the same run." : "",
    commandBlock("again", state.data.command));
}
