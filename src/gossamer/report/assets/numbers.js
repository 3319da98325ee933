// Numbers as people read them. A value that is missing is a dash, never a zero.

const MISSING = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function showNumber(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 999.5) {
    return size < 1e7 ? Math.round(value).toLocaleString("en-GB") : value.toExponential(2);
  }
  return size < 1e-4 ? value.toExponential(2) : value.toPrecision(3);
}

function showSeconds(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size > 0 && size < 1e-3) return `${showNumber(value * 1e6)} µs`;
  if (size > 0 && size < 0.1) return `${showNumber(value * 1e3)} ms`;
  return `${showNumber(value)} s`;
}

function showShare(value) {
  if (!isNumber(value)) return MISSING;
  const percent = 100 * value;
  const digits = Math.abs(percent) >= 10 || percent === 0 ? 0 : 1;
  return `${percent.toFixed(digits)} %`;
}

function showAccuracy(value) {
  return isNumber(value) ? `${Number((100 * value).toFixed(2))} %` : MISSING;
}

// In a table all have as many digits, so that they stand below each other.
function showAccuracyCell(value) {
  return isNumber(value) ? `${(100 * value).toFixed(2)} %` : MISSING;
}

function showScore(value, key) {
  return key === "accuracy" ? showAccuracy(value) : showNumber(value);
}

const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

function showBytes(value) {
  if (!isNumber(value)) return MISSING;
  let amount = value;
  let unit = 0;
  while (Math.abs(amount) >= 999.5 && unit < BYTE_UNITS.length - 1) {
    amount /= 1000;
    unit += 1;
  }
  const text = unit === 0 && Number.isInteger(amount) ? String(amount) : showNumber(amount);
  return `${text} ${BYTE_UNITS[unit]}`;
}

function showBytesTick(value) {
  return showBytes(value).replace(/\.0+ /, " ");
}

function showTick(value) {
  if (!isNumber(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential().replace("e+", "e");
  return Number(value.toPrecision(6)).toLocaleString("en-GB", { maximumFractionDigits: 8 });
}

// A mean of counts need not be a whole number.
function showCount(value) {
  return Number.isInteger(value) ? showTick(value) : showNumber(value);
}

function enumerate(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

// A number and its unit stay on one line, and so do the two ends of a range.
function keepUnits(text) {
  return text.replace(/(\d) (%|s|ms)(?![\p{L}\d])/gu, "$1\u00a0$2").replace(/(\d)-(?=\d)/g, "$1-\u2060");
}

function sum(values) {
  return values.reduce((total, value) => total + (isNumber(value) ? value : 0), 0);
}

function mean(values) {
  const known = values.filter(isNumber);
  return known.length ? sum(known) / known.length : null;
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function plural(count, word) {
  return `${count.toLocaleString("en-GB")} ${word}${count === 1 ? "" : "s"}`;
}

function showDollars(value) {
  return isNumber(value) ? `$${showNumber(value)}` : MISSING;
}

function showJoules(value) {
  if (!isNumber(value)) return MISSING;
  if (value >= 3.6e5) return `${showNumber(value / 3.6e6)} kWh`;
  return value >= 1e3 ? `${showNumber(value / 1e3)} kJ` : `${showNumber(value)} J`;
}
