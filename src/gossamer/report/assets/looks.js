// How a method looks: colour, dash and marker, as in the printed pictures. The data say which look a
// method has: it is the method's own, whatever its rank. The lists' lengths share no divisor, so that
// no two of 660 methods look alike, and nothing depends on colour alone.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
  "#7B52AB", "#8C5A3C", "#7D8B1F", "#B3224A", "#1F8A8A", "#5C6FD6"];
const DASHES = ["solid", [9, 3], [5, 2.5], [10, 3, 2, 3], [2, 2]];
const MARKERS = [
  "M10 1A9 9 0 1 0 10 19A9 9 0 1 0 10 1Z",
  "M2 2H18V18H2Z",
  "M10 1L19 18H1Z",
  "M10 0L20 10L10 20L0 10Z",
  "M10 19L1 2H19Z",
  "M7 1H13V7H19V13H13V19H7V13H1V7H7Z",
  "M4 0L10 6L16 0L20 4L14 10L20 16L16 20L10 14L4 20L0 16L6 10L0 4Z",
  "M1 10L18 1V19Z",
  "M19 10L2 1V19Z",
  "M10 0L20 7.5L16 19H4L0 7.5Z",
  "M5 1H15L20 10L15 19H5L0 10Z",
];

function lookAt(place) {
  return {
    colour: COLOURS[place % COLOURS.length],
    dash: DASHES[place % DASHES.length],
    path: MARKERS[place % MARKERS.length],
    symbol: `path://${MARKERS[place % MARKERS.length]}`,
  };
}

function lookOf(method) {
  return lookAt(Number.isInteger(method.look) && method.look >= 0 ? method.look : Math.max(0, placeOf(method)));
}

function swatch(look) {
  const line = { x1: 0, y1: 8, x2: 40, y2: 8, stroke: look.colour, "stroke-width": 2.5 };
  if (look.dash !== "solid") line["stroke-dasharray"] = look.dash.join(" ");
  return draw("svg", { class: "swatch", viewBox: "0 0 40 16", width: 40, height: 16, "aria-hidden": "true" },
    draw("line", line),
    draw("path", { d: look.path, fill: look.colour, transform: "translate(14 2) scale(0.6)" }));
}

// What a worker does with its time: greys, and a pale yellow that no method has.
const KINDS = ["computing", "communicating", "waiting", "paused", "other"];

function kindLook(kind) {
  const paper = inks().paper;
  const dark = state.isDark;
  const line = dark ? "rgba(0,0,0,0.4)" : "rgba(90,75,0,0.38)";
  const looks = {
    computing: { color: dark ? "#7f8998" : "#67717f" },
    communicating: {
      color: dark ? "#d3d9e2" : "#b6bfcc",
      decal: { symbol: "circle", symbolSize: 0.5, dashArrayX: [[6, 6], [0, 6, 6, 0]], dashArrayY: [6, 0],
        color: dark ? "#3c4654" : "#4b5563" },
    },
    waiting: {
      color: dark ? "#b3a94e" : "#f4eca4",
      decal: { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 5], rotation: -Math.PI / 4, color: line },
    },
    paused: {
      color: paper,
      decal: { symbol: "rect", symbolSize: 0.6, dashArrayX: [[6, 0], [0, 6]], dashArrayY: [6, 0], rotation: Math.PI / 4,
        color: inks().faint },
    },
    other: { color: dark ? "#3a414c" : "#dfe3e8" },
  };
  return looks[kind] || looks.other;
}

function kindOf(name) {
  return KINDS.includes(name) ? name : "other";
}

// The page's own colours, read from its style: charts follow what the style says. Once a theme:
// each reading makes the browser lay out the page.
let currentInks = null;

function inks() {
  if (!currentInks) {
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "faint", "line", "paper", "panel"];
    currentInks = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return currentInks;
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

function prefersDark() {
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function applyTheme(theme) {
  state.isDark = (theme || state.theme || (prefersDark() ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = state.isDark ? "dark" : "light";
  currentInks = null;
}

function lineSeries(method, points, place, count) {
  const look = lookOf(method);
  // Markers of different methods start apart, so that equal curves stay tellable.
  const stride = Math.max(1, Math.floor(points.length / 6));
  const first = Math.floor((place * stride) / Math.max(1, count));
  const isMarked = (_, at) => at === points.length - 1 || (at >= first && (at - first) % stride === 0);
  const places = points.map((point) => [point.x, point.y]);
  return [{
    type: "line",
    name: method.label,
    z: 3,
    data: places,
    symbol: "none",
    clip: true,
    lineStyle: { color: look.colour, width: 2, type: look.dash },
    itemStyle: { color: look.colour },
    emphasis: { disabled: true },
  }, {
    // A series of its own: a line draws an element for each of its points, marked or not.
    type: "scatter",
    name: method.label,
    z: 4,
    data: places.filter(isMarked),
    symbol: look.symbol,
    symbolSize: 8,
    clip: true,
    silent: true,
    itemStyle: { color: look.colour, opacity: 1 },
  }];
}
