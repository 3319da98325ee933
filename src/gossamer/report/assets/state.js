// What the reader has chosen. It belongs to the page, not to the data: new data leaves it alone.

const state = {
  data: null,
  hidden: new Set(), // labels of the methods switched off
  chosen: new Map(), // name of a chooser -> label of the method chosen there
  sorts: new Map(), // name of a table -> {column, isDescending}
  theme: null, // "light" or "dark" once the reader has pressed the button
  isDark: false,
};

function allMethods() {
  return list(state.data && state.data.methods);
}

function shownMethods() {
  return allMethods().filter((method) => !state.hidden.has(method.label));
}

function placeOf(method) {
  return allMethods().findIndex((one) => one.label === method.label);
}

// The method that a chooser stands at: the reader's choice while it is shown, else the usual one.
function chosenMethod(name, candidates, usual) {
  const wanted = state.chosen.get(name);
  return candidates.find((method) => method.label === wanted) || usual || candidates[0] || null;
}

function figureOf(method, name) {
  const value = method.figures ? method.figures[name] : null;
  return isNumber(value) ? value : null;
}

function timeWord() {
  return state.data.time || "seconds";
}

// Fastest first; then those that reached the target with some seeds only; then the others.
function rankedMethods(methods) {
  const order = (method) => {
    const arrival = method.arrival || {};
    if (isNumber(arrival.mean)) return [0, arrival.mean];
    return [1, arrival.seeds ? -(arrival.reached || 0) / arrival.seeds : 1];
  };
  return [...methods].sort((one, other) => {
    const [first, second] = [order(one), order(other)];
    return first[0] - second[0] || first[1] - second[1] || placeOf(one) - placeOf(other);
  });
}
