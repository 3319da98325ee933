// What can be moved: each value has a slider whose stops are round numbers, and a field beside it
// that takes any number, with its unit. The address of the page holds what differs from the start.

const STOPS = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];

function decades(low, high) {
  const stops = [];
  for (let power = Math.round(Math.log10(low)); power < Math.round(Math.log10(high)); power += 1) {
    stops.push(...STOPS.map((digit) => Number((digit * 10 ** power).toPrecision(3))));
  }
  return [...stops, high];
}

// A number with the unit that keeps it short; six digits, so that what was typed stays as it is.
function withUnit(value, units) {
  const found = units.find(([, size]) => value >= size * 0.9999995) || units[units.length - 1];
  return `${Number((value / found[1]).toPrecision(6))}${found[0] ? ` ${found[0]}` : ""}`;
}

const RATES = [["Tbit/s", 1.25e11], ["Gbit/s", 1.25e8], ["Mbit/s", 1.25e5], ["kbit/s", 125]];
const DURATIONS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const COUNTS = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];

function readIn(units) {
  const sizes = new Map(units.flatMap(([unit, size]) => [[unit.toLowerCase(), size], [unit.toLowerCase().replace("/s", ""), size]]));
  if (units === DURATIONS) sizes.set("us", 1e-6);
  if (units === COUNTS) sizes.set("b", 1e9);
  return (text) => {
    const found = /^(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?\s*([^\d\s]*)$/i.exec(text.trim());
    const size = found && sizes.get(found[3].toLowerCase().replace("μ", "µ"));
    // Nothing has no unit.
    if (found && Number(found[1]) === 0) return 0;
    return size === null || size === undefined ? NaN : Number(`${found[1].replaceAll(",", "")}${found[2] || ""}`) * size;
  };
}

function readWhole(text) {
  return /^\d+$/.test(text.trim()) ? Number(text) : NaN;
}

function readPeriod(text) {
  return /^own$/i.test(text.trim()) ? OWN_PERIOD : readWhole(text);
}

const showDuration = (value) => (value === 0 ? "0 s" : withUnit(value, DURATIONS));

// In the order in which the page has them. `least` and `most` are what a field takes.
const SLIDERS = [
  { name: "parameters", title: "Parameters", hint: "of the model, such as 100 M", stops: () => decades(1e4, 1e12), least: 1, most: 1e14, show: (value) => withUnit(value, COUNTS), read: readIn(COUNTS) },
  { name: "workers", title: "Workers", hint: "with one card each, or as the cluster has them", stops: () => state.data.counts, show: String, read: readWhole, isListed: true },
  { name: "bandwidth", title: "Bandwidth", hint: "of a card, such as 25 Gbit/s", stops: () => decades(1e5, 1e13).map((bits) => bits / 8), least: 1, most: 1e15, show: (value) => withUnit(value, RATES), read: readIn(RATES) },
  { name: "latency", title: "Latency", hint: "of a message, such as 50 µs", stops: () => [0, ...decades(1e-7, 1)], least: 0, most: 1e4, show: showDuration, read: readIn(DURATIONS) },
  { name: "fixed", title: "Step, fixed", hint: "the part of a gradient's time that no sample adds to", stops: () => [0, ...decades(1e-5, 100)], least: 0, most: 1e6, show: showDuration, read: readIn(DURATIONS) },
  { name: "per_sample", title: "Step, per sample", hint: "what each sample of the batch adds", stops: () => [0, ...decades(1e-7, 10)], least: 0, most: 1e6, show: showDuration, read: readIn(DURATIONS) },
  { name: "batch", title: "Batch", hint: "samples of one worker and step", stops: () => py.range(18).map((power) => 2 ** power), least: 1, most: 1e7, show: String, read: readWhole },
  { name: "period", title: "Period", hint: "steps between meetings, for methods that have one; own: what each method says", stops: () => [OWN_PERIOD, ...py.range(11).map((power) => 2 ** power)], least: 0, most: 1e6, show: (value) => (value === OWN_PERIOD ? "own" : String(value)), read: readPeriod },
  { name: "bits", title: "Bits", hint: "of each number on the network", stops: () => [1, 2, 4, 8, 16, 32, 64], least: 1, most: 64, show: String, read: readWhole },
];

const values = {};
const refusals = new Map(); // name of a slider -> what is wrong with its field

function whyNot(slider, value, text) {
  const shown = `${slider.title} must be `;
  if (slider.isListed) return slider.stops().includes(value) ? "" : `${shown}one of ${slider.stops().join(", ")}, got ${text}.`;
  if (!isNumber(value)) return `${shown}a number, ${slider.hint.includes("such as") ? slider.hint.slice(slider.hint.indexOf("such as")) : `such as ${slider.show(state.data.start[slider.name])}`}, got ${text || "nothing"}.`;
  if (value < slider.least || value > slider.most) return `${shown}from ${slider.show(slider.least)} to ${slider.show(slider.most)}, got ${text}.`;
  return "";
}

// A step must take some time, or there is nothing to divide by.
function noTime(name, value) {
  const next = { ...values, [name]: value };
  return next.fixed + next.per_sample * next.batch > 0 ? "" : "A step must take some time: give a fixed part or one per sample.";
}

function setValue(slider, value, text) {
  const why = whyNot(slider, value, text) || noTime(slider.name, value);
  if (why) refusals.set(slider.name, why);
  else {
    refusals.delete(slider.name);
    values[slider.name] = value;
    writeAddress();
  }
  updateSoon();
}

// A slider that is dragged asks faster than a page is drawn: one answer a frame is enough.
let isUpdating = false;

function updateSoon() {
  if (isUpdating) return;
  isUpdating = true;
  requestAnimationFrame(() => {
    isUpdating = false;
    update();
  });
}

function nearest(stops, value) {
  const distance = (stop) => (stop > 0 && value > 0 ? Math.abs(Math.log(stop / value)) : stop === value ? 0 : 1e9);
  return stops.reduce((best, stop, at) => (distance(stop) < distance(stops[best]) ? at : best), 0);
}

function buildSlider(slider) {
  const [range, field] = [`slide-${slider.name}`, `type-${slider.name}`];
  const stops = slider.stops();
  return make("div", { class: "slider" },
    make("label", { for: field }, slider.title),
    make("input", { id: field, type: "text", autocomplete: "off", spellcheck: "false", "aria-describedby": `hint-${slider.name}`,
      change: (event) => setValue(slider, slider.read(event.target.value), event.target.value.trim()) }),
    make("input", { id: range, type: "range", min: 0, max: stops.length - 1, step: 1, "aria-label": slider.title, title: slider.hint,
      input: (event) => setValue(slider, stops[Number(event.target.value)], "") }),
    make("span", { id: `hint-${slider.name}`, class: "unseen" }, slider.hint),
    make("p", { class: "wrong", role: "alert" }));
}

function showSlider(slider) {
  const element = kept(`slider ${slider.name}`, () => buildSlider(slider));
  const [, field, range, , wrong] = element.children;
  const shown = slider.show(values[slider.name]);
  const why = refusals.get(slider.name) || "";
  // Who is typing is not interrupted, and a wrong entry stays to be mended.
  if (!why && document.activeElement !== field) field.value = shown;
  if (!why && document.activeElement === field && slider.read(field.value) !== values[slider.name]) field.value = shown;
  field.setAttribute("aria-invalid", String(Boolean(why)));
  range.value = String(nearest(slider.stops(), values[slider.name]));
  range.setAttribute("aria-valuetext", shown);
  setText(wrong, why);
  wrong.hidden = !why;
  return element;
}

function startAgain() {
  Object.assign(values, state.data.start);
  refusals.clear();
  writeAddress();
  update();
}

function slidersPanel() {
  const panel = kept("sliders", () => make("section", { id: "sliders", "aria-label": "What to ask about" },
    make("div", { class: "grid" }),
    make("p", { class: "told", role: "status" }),
    make("div", { class: "keys" },
      make("button", { type: "button", class: "copy", click: startAgain }, "Start again"),
      make("button", { type: "button", class: "copy", "aria-live": "polite", click: (event) => copyText(event.currentTarget, location.href, "Copy link") }, "Copy link"))));
  arrange(panel.firstChild, SLIDERS.map(showSlider));
  return panel;
}

// ------------------------------------------------------------------ the address

// Only what differs from the start, so that a link stays short and a new start shows through.
function writeAddress() {
  const parts = SLIDERS.filter(({ name }) => values[name] !== state.data.start[name])
    .map(({ name }) => `${name}=${values[name]}`);
  if (state.hidden.size) parts.push(`hidden=${[...state.hidden].map(encodeURIComponent).join(",")}`);
  const over = state.chosen.get("axis");
  if (over) parts.push(`over=${over}`);
  const address = parts.length ? `#${parts.join("&")}` : location.pathname + location.search;
  if (location.hash !== (parts.length ? address : "")) history.replaceState(null, "", address);
}

// A link may be damaged: what is not a value of this page is left at its start.
function readAddress() {
  Object.assign(values, state.data.start);
  refusals.clear();
  state.hidden.clear();
  for (const part of location.hash.slice(1).split("&")) {
    const [name, text] = [part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)];
    const slider = SLIDERS.find((one) => one.name === name);
    const value = Number(text);
    if (slider && text !== "" && !whyNot(slider, value, text)) values[name] = slider.read === readWhole || slider.read === readPeriod ? Math.round(value) : value;
    if (name === "over" && AXES.some((one) => one.name === text)) state.chosen.set("axis", text);
    if (name === "hidden") text.split(",").map(decoded).forEach((label) => state.hidden.add(label));
  }
  const labels = new Set(allMethods().map((one) => one.label));
  for (const label of [...state.hidden]) if (!labels.has(label)) state.hidden.delete(label);
  if (noTime("fixed", values.fixed)) Object.assign(values, { fixed: state.data.start.fixed, per_sample: state.data.start.per_sample });
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
