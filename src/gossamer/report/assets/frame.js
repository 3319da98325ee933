// What every page has: the row of methods, light and dark, notices, and commands to copy.

function legendButton(method) {
  const button = kept(`legend ${method.label}`, () =>
    make("button", { type: "button", class: "key", click: () => toggleMethod(method.label) }));
  button.setAttribute("aria-pressed", String(!state.hidden.has(method.label)));
  button.replaceChildren(swatch(lookOf(method)), make("span", null, method.label));
  return button;
}

function toggleMethod(label) {
  if (state.hidden.has(label)) state.hidden.delete(label);
  else state.hidden.add(label);
  update();
}

function showAll() {
  state.hidden.clear();
  update();
}

function legend() {
  const methods = allMethods();
  if (!methods.length) return null;
  const element = kept("legend", () => make("nav", { class: "legend", "aria-label": "Methods shown in all charts" }));
  const all = kept("legend all", () => make("button", { type: "button", class: "key all", click: showAll }, "Show all"));
  all.hidden = !methods.some((method) => state.hidden.has(method.label));
  return arrange(element, [...methods.map(legendButton), all]);
}

function legendHint() {
  if (allMethods().length < 2) return null;
  return kept("legend hint", () => make("p", { class: "hint" }, "Press a method to take it out of all charts",
    make("span", { class: "narrow" }, "; swipe the row for the others"), "."));
}

function themeButton() {
  const button = kept("theme", () => make("button", { type: "button", class: "theme", click: () => {
    state.theme = state.isDark ? "light" : "dark";
    applyTheme();
    update();
  } }));
  return setText(button, state.isDark ? "Light" : "Dark");
}

function notices() {
  const [told, missing] = [list(state.data.notices), list(state.data.missing)];
  if (!told.length && !missing.length) return null;
  const element = kept("notices", () => make("aside", { class: "notices", "aria-label": "Notices" }));
  const group = (heading, lines) => (lines.length
    ? [make("h2", null, heading), make("ul", null, lines.map((line) => make("li", null, String(line))))] : []);
  element.replaceChildren(...group("Good to know", told), ...group("Missing from this page", missing));
  return element;
}

function nothingShown() {
  const methods = allMethods();
  if (!methods.length || shownMethods().length) return null;
  return kept("nothing", () => make("p", { class: "nothing", role: "status" },
    "Every method is switched off: press one in the row above to see it again."));
}

async function copyText(button, text, name, element = null) {
  let isCopied = false;
  try {
    await navigator.clipboard.writeText(text);
    isCopied = true;
  } catch {
    // A page from disk may be refused the clipboard; selected text is one key away from it.
    if (element) getSelection().selectAllChildren(element);
    isCopied = Boolean(element) && document.execCommand("copy");
  }
  setText(button, isCopied ? "Copied" : element ? "Selected: press Ctrl+C" : "Copy it from the address bar");
  setTimeout(() => setText(button, name), 2000);
}

function commandBlock(name, text) {
  const element = kept(`command ${name}`, () => {
    const code = make("code");
    return make("div", { class: "command" }, make("pre", { tabindex: 0 }, code),
      make("button", { type: "button", class: "copy", "aria-live": "polite", click: (event) => copyText(event.currentTarget, code.textContent, "Copy", code) }, "Copy"));
  });
  setText(element.querySelector("code"), text);
  return element;
}


// What few readers want to read at once stands behind one line that opens it.
function folded(name, words, inside) {
  const element = kept(`folded ${name}`, () => make("details", { class: "folded" }, make("summary")));
  setText(element.firstChild, words);
  return arrange(element, [element.firstChild, inside]);
}

// A page drawn again whenever its looks change.
function keepLooks() {
  applyTheme();
  const look = (theme) => () => {
    applyTheme(theme);
    update();
  };
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", look());
  // Paper is white, whatever the screen is.
  window.addEventListener("beforeprint", look("light"));
  window.addEventListener("afterprint", look());
}
