// Tables that sort by any column, by click or key. Numbers sort as numbers; what is missing comes
// last either way. A cell is a plain value, or {text, value, node} where what is shown differs.

function cellText(cell) {
  if (cell === null || cell === undefined || cell === "") return MISSING;
  if (typeof cell === "object") return cell.text === undefined ? MISSING : String(cell.text);
  if (typeof cell === "number") return showTick(Number.isInteger(cell) ? cell : Number(cell.toPrecision(4)));
  return String(cell);
}

const LEADING_NUMBER = /^[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?/i;
const SCALES = { ns: 1e-9, us: 1e-6, "µs": 1e-6, ms: 1e-3, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };

function numberIn(text) {
  const found = LEADING_NUMBER.exec(text);
  if (!found) return null;
  const unit = text.slice(found[0].length).trim().split(/[\s/]/)[0];
  return Number(found[0].replaceAll(",", "")) * (SCALES[unit] || 1);
}

function cellValue(cell) {
  if (cell === null || cell === undefined || cell === "") return null;
  if (typeof cell === "object") return cell.value === undefined ? cellText(cell) : cell.value;
  return cell;
}

// The values to sort a column by: numbers if each cell of it is one, or starts with one.
function sortValues(rows, column) {
  const values = rows.map((row) => cellValue(row[column]));
  const parsed = values.map((value) => (typeof value === "string" ? numberIn(value.trim()) : value));
  const isNumeric = values.every((value, index) => value === null || isNumber(parsed[index]));
  return { values: isNumeric ? parsed : values.map((value) => (value === null ? null : String(value))), isNumeric };
}

function sortedRows(rows, sort) {
  if (!sort) return rows;
  const { values, isNumeric } = sortValues(rows, sort.column);
  const sign = sort.isDescending ? -1 : 1;
  const order = rows.map((_, index) => index).sort((one, other) => {
    const [first, second] = [values[one], values[other]];
    if (first === null || second === null) return (first === null) - (second === null);
    return sign * (isNumeric ? first - second : first.localeCompare(second, "en", { numeric: true }));
  });
  return order.map((index) => rows[index]);
}

function headerCell(name, title, column) {
  const button = make("button", { type: "button", click: () => turnSort(name, column) },
    make("span", null, title), make("span", { class: "arrow", "aria-hidden": "true" }));
  return make("th", { scope: "col", "aria-sort": "none" }, button);
}

function turnSort(name, column) {
  const before = state.sorts.get(name);
  const isSame = before && before.column === column;
  state.sorts.set(name, { column, isDescending: isSame ? !before.isDescending : false });
  fillTable(keptElements.get(`table ${name}`));
}

function fillTable(box) {
  const { name, titles, rows } = box.table;
  const [head, body] = box.querySelector("table").children;
  const sort = state.sorts.get(name);
  // The first column names its row; names stand to the left, also where they are numbers.
  const numeric = titles.map((_, column) => column > 0 && rows.length > 0 && sortValues(rows, column).isNumeric);
  [...head.rows[0].cells].forEach((cell, column) => {
    const isSorted = sort && sort.column === column;
    cell.setAttribute("aria-sort", !isSorted ? "none" : sort.isDescending ? "descending" : "ascending");
    cell.classList.toggle("number", numeric[column]);
    setText(cell.querySelector(".arrow"), !isSorted ? "" : sort.isDescending ? "▼" : "▲");
  });
  body.replaceChildren(...sortedRows(rows, sort).map((row) => make("tr", null, titles.map((_, column) => {
    const cell = row[column];
    const style = [numeric[column] ? "number" : "", (cell && cell.style) || ""].join(" ").trim();
    const content = cell && cell.node ? cell.node() : cellText(cell);
    return column === 0
      ? make("th", { scope: "row", class: style || null }, content)
      : make("td", { class: style || null, "data-title": titles[column] }, content);
  }))));
}

// A wide table scrolls in a box of its own, which the keyboard reaches too.
function table(name, caption, titles, rows) {
  const box = kept(`table ${name}`, () =>
    make("div", { class: "table", tabindex: 0, role: "region" },
      make("table", null, make("thead", null, make("tr")), make("tbody"))));
  box.setAttribute("aria-label", caption);
  const head = box.querySelector("thead tr");
  if (!box.table || box.table.titles.join("\n") !== titles.join("\n")) {
    head.replaceChildren(...titles.map((title, column) => headerCell(name, title, column)));
    const sort = state.sorts.get(name);
    if (sort && sort.column >= titles.length) state.sorts.delete(name);
  }
  box.table = { name, titles, rows };
  fillTable(box);
  return box;
}
