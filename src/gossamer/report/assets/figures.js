// A figure: a chart, the words on what to look for, and its numbers as a table for who cannot see
// it. Figures are kept by name; new data, a toggle or another width redraws them where they stand.

const usedFigures = new Set();

function buildFigure(name) {
  const element = make("figure", { id: `figure-${name}` },
    make("h3"), make("div", { class: "chart", role: "img" }), make("figcaption"),
    make("details", { class: "numbers" }, make("summary", null, "Show numbers")));
  const [heading, chart, caption, details] = element.children;
  const figure = { name, element, heading, host: chart, caption, details, chart: null, spec: null, width: 0 };
  details.addEventListener("toggle", () => showNumbers(figure));
  sizes.observe(chart);
  chart.figure = figure;
  return figure;
}

// spec: {title, caption, height(width), option(width, inks), numbers() -> {titles, rows}, control}
function figure(name, spec) {
  const one = kept(`figure ${name}`, () => buildFigure(name));
  one.spec = spec;
  setText(one.heading, spec.title);
  setText(one.caption, spec.caption);
  one.host.setAttribute("aria-label", `${spec.title}. ${spec.caption}`);
  arrange(one.element, [one.heading, spec.control, one.host, one.caption, one.details]);
  usedFigures.add(one);
  return one.element;
}

function showNumbers(one) {
  if (!one.details.open) return;
  const { titles, rows } = one.spec.numbers();
  arrange(one.details, [one.details.firstChild, table(`numbers ${one.name}`, `Numbers: ${one.spec.title}`, titles, rows)]);
}

function drawFigure(one, width) {
  if (width < 40) return;
  const height = Math.round(one.spec.height(width));
  one.host.style.height = `${height}px`;
  if (!one.chart) one.chart = echarts.init(one.host, null, { renderer: "svg", width, height });
  else if (one.chart.getWidth() !== width || one.chart.getHeight() !== height) one.chart.resize({ width, height });
  one.width = width;
  const colours = inks();
  one.chart.setOption({
    animation: false,
    textStyle: { fontFamily: FONT, color: colours.ink },
    ...one.spec.option(width, colours),
  }, { notMerge: true });
  showNumbers(one);
}

function drawFigures() {
  // All widths first: measuring between drawings would lay the page out for each of them.
  const widths = [...usedFigures].map((one) => [one, Math.floor(one.host.clientWidth)]);
  for (const [one, width] of widths) drawFigure(one, width);
}

// A chart that is no longer on the page lets go of its memory.
function dropUnused(before) {
  for (const one of before) {
    if (usedFigures.has(one)) continue;
    if (one.chart) one.chart.dispose();
    one.chart = null;
  }
}

const sizes = new ResizeObserver((entries) => {
  // On the next frame: a chart that changes its height here would be told of itself again.
  requestAnimationFrame(() => {
    for (const { target } of entries) {
      const one = target.figure;
      const width = Math.floor(target.clientWidth);
      if (usedFigures.has(one) && width !== one.width) drawFigure(one, width);
    }
  });
});

// What hovering shows: a heading and rows of [swatch or null, label, value].
function tooltipBox(heading, rows) {
  return make("div", { class: "tip" },
    make("div", { class: "tip-heading" }, heading),
    rows.map(([mark, label, value]) =>
      make("div", { class: "tip-row" }, mark, make("span", null, label), make("b", null, value))));
}

function tooltip(colours, more) {
  return {
    confine: true,
    backgroundColor: colours.panel,
    borderColor: colours.line,
    padding: [8, 12],
    textStyle: { color: colours.ink, fontSize: 13 },
    ...more,
  };
}
