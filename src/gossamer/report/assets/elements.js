// Making and placing elements. Text from the data is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Elements by name, made once: what a reader has opened, chosen or focused survives new data.
const keptElements = new Map();

function kept(name, build) {
  if (!keptElements.has(name)) keptElements.set(name, build());
  return keptElements.get(name);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

// Children that stay are not taken out on the way: an element that moves loses its focus.
function arrange(parent, wanted) {
  const children = wanted.flat().filter((child) => child !== null && child !== undefined);
  const staying = new Set(children);
  for (const child of [...parent.childNodes]) if (!staying.has(child)) child.remove();
  children.forEach((child, index) => {
    if (parent.childNodes[index] !== child) parent.insertBefore(child, parent.childNodes[index] || null);
  });
  return parent;
}

function section(name, heading, introduction, ...children) {
  const inside = children.flat().filter((child) => child);
  if (!inside.length) return null;
  const element = kept(`section ${name}`, () =>
    make("section", { id: name, "aria-labelledby": `${name}-heading` },
      make("h2", { id: `${name}-heading` }), make("p", { class: "introduction" }), make("div", { class: "inside" })));
  const [title, words, body] = element.children;
  setText(title, heading);
  setText(words, introduction || "");
  words.hidden = !introduction;
  arrange(body, inside);
  return element;
}

function columns(name, ...children) {
  const inside = children.flat().filter((child) => child);
  if (!inside.length) return null;
  return arrange(kept(`columns ${name}`, () => make("div", { class: "columns" })), inside);
}

function chooser(name, label, choices, chosen, onChoice) {
  const element = kept(`chooser ${name}`, () => {
    const select = make("select", { id: `choose-${name}` });
    return make("div", { class: "chooser" }, make("label", { for: `choose-${name}` }, label), select);
  });
  const select = element.querySelector("select");
  const shown = [...select.options].map((option) => option.value);
  if (shown.join("\n") !== choices.join("\n")) {
    select.replaceChildren(...choices.map((choice) => make("option", { value: choice }, choice)));
  }
  select.value = chosen;
  select.onchange = () => onChoice(select.value);
  return element;
}
