// The page as a whole: header, legend, sections, and what keeps it up to date.

// The verdict is of the runs, not of what a reader looks at.
function scope() {
  const hidden = allMethods().filter((method) => state.hidden.has(method.label)).length;
  const element = kept("scope", () => make("p", { class: "scope", role: "note" }));
  element.hidden = !hidden || !state.data.verdict;
  const are = hidden === 1 ? "one of them is" : `${hidden} of them are`;
  return setText(element, `This sentence speaks of all ${plural(allMethods().length, "method")}; ${are} switched off below.`);
}

// How far an accuracy can be trusted that was taken on so few samples.
function precision() {
  const samples = state.data.test_samples;
  const best = Math.max(...allMethods().map((method) => figureOf(method, "accuracy") || 0), 0);
  const at = isNumber(state.data.target) && state.data.score === "accuracy" ? state.data.target : best;
  if (!isNumber(samples) || samples < 1 || state.data.score !== "accuracy" || !(at > 0 && at < 1)) return "";
  const error = 100 * Math.sqrt((at * (1 - at)) / samples);
  return `Accuracies are of ${plural(samples, "test sample")}: one of them is ${showNumber(100 / samples)} points, and at ${showAccuracy(at)} the standard error `
    + `of a single run is at most ${showNumber(error)} points. All methods are judged by the same samples.`;
}

function header() {
  const data = state.data;
  const element = kept("header", () => make("header", null,
    make("div", { class: "above" }, make("p", { class: "kind" }), themeButton()),
    make("h1"), scope(), make("p", { class: "title" }), make("p", { class: "precision" })));
  const [above, verdict, , title, sure] = element.children;
  scope();
  setText(sure, keepUnits(precision()));
  sure.hidden = !sure.textContent;
  themeButton();
  setText(above.firstChild, `gossamer ${data.kind || ""}${data.is_growing ? " · still running" : ""}`);
  setText(verdict, keepUnits(data.verdict || data.title || "No verdict yet."));
  verdict.classList.toggle("long", verdict.textContent.length > 120);
  verdict.classList.toggle("longer", verdict.textContent.length > 220);
  const words = [data.verdict ? data.title : "", data.subtitle].filter((part) => part);
  title.replaceChildren(...words.map((part, at) => make("span", { class: at === 0 && words.length > 1 ? "name" : null }, part)));
  return element;
}

function raceSection() {
  const score = scoreKey();
  const heading = allMethods().length > 1 ? "The race" : "How it went";
  return section("race", heading, "The same training twice: over time, where waiting counts, and over epochs, where only the learning counts. Scores that were taken often are averages over the epochs around a moment.",
    curvePair(score), arrivalFigure());
}

function learningSection() {
  const others = ["accuracy", "loss", "training_loss", "noise_scale"].filter((key) => key !== scoreKey());
  return section("learning", allMethods().length > 1 ? "How they learn" : "How it learns", "", others.map(curvePair));
}

function consensusSection() {
  return section("consensus", "How far apart the workers drift", "", curvePair("consensus_distance"));
}

function footer() {
  const element = kept("footer", () => make("footer", null, make("p")));
  const reach = state.data.is_growing ? "This page asks the run for new data every two seconds."
    : "This page contains all its data and contacts no server.";
  setText(element.firstChild, `Made by gossamer ${state.data.version || ""}. ${reach} Charts by Apache ECharts.`);
  return element;
}

function update() {
  const before = new Set(usedFigures);
  usedFigures.clear();
  const advice = adviceSection();
  const sections = [raceSection(), expensesSection(), changesSection(), resultsSection(), timeSection(), learningSection(), lineageSection(), stalenessSection(),
    consensusSection(), trafficSection(), topologySection(), clusterSection(), gridSection(), ...heatMapSections(),
    picturesSection(), ...furtherTables(), settingsSection(), commandSection()];
  const main = arrange(kept("main", () => make("main")), [advice, notices(), nothingShown(), ...sections]);
  arrange(document.getElementById("page"), [header(), contents([advice, ...sections]), legendHint(), legend(), main, footer()]);
  dropUnused(before);
  drawFigures();
  hintAtMore();
}

// Shows these data; called again with newer data it keeps what the reader has toggled and sorted.
function render(data) {
  state.data = data;
  document.title = data.title || "gossamer";
  update();
}

const POLL_MILLISECONDS = 2000;

async function follow() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (answer.ok) render(await answer.json());
  } catch {
    // The server is gone or busy: what is shown stays, and the next question may be answered.
  }
  if (state.data.is_growing) setTimeout(follow, POLL_MILLISECONDS);
}

function start() {
  keepLooks();
  render(JSON.parse(document.getElementById("data").textContent));
  if (state.data.is_growing) setTimeout(follow, POLL_MILLISECONDS);
}

window.gossamer = { render };
start();
