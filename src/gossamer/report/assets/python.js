// What translated Python means where the two languages differ. Lists and tuples are arrays, and so
// are ranges and what comprehensions give.

class ConfigurationError extends Error {}
class NoClosedForm extends ConfigurationError {}

const py = {
  truth(value) {
    return Array.isArray(value) ? value.length > 0 : Boolean(value);
  },
  either: (one, other) => (py.truth(one) ? one : other()),
  both: (one, other) => (py.truth(one) ? other() : one),
  item(of, index) {
    if (!Array.isArray(of)) return of[index];
    return of[index < 0 ? of.length + index : index];
  },
  get: (of, key, usual = null) => (key in of ? of[key] : usual),
  len: (values) => values.length,
  list: (values) => [...values],
  tuple: (values) => [...values],
  reversed: (values) => [...values].reverse(),
  sorted: (values) => [...values].sort((one, other) => one - other),
  sum: (values) => values.reduce((total, value) => total + value, 0),
  abs: Math.abs,
  max: Math.max,
  min: Math.min,
  max_of: (values, usual = null) => (values.length ? values.reduce((one, other) => Math.max(one, other)) : usual),
  min_of: (values, usual = null) => (values.length ? values.reduce((one, other) => Math.min(one, other)) : usual),
  repeat: (values, count) => Array.from({ length: Math.max(0, count) }, () => values).flat(),
  range(first, end) {
    const [start, stop] = end === undefined ? [0, first] : [first, end];
    return Array.from({ length: Math.max(0, stop - start) }, (_, at) => start + at);
  },
  enumerate: (values) => values.map((value, at) => [at, value]),
  zip: (...lists) => py.range(py.min_of(lists.map(py.len))).map((at) => lists.map((one) => one[at])),
  pairwise: (values) => values.slice(1).map((value, at) => [values[at], value]),
  // Pairs only.
  combinations: (values) => values.flatMap((one, at) => values.slice(at + 1).map((other) => [one, other])),
  // Halves go to the even neighbour.
  round(value) {
    const low = Math.floor(value);
    if (value - low !== 0.5) return Math.round(value);
    return low % 2 === 0 ? low : low + 1;
  },
  floor_div: (one, other) => Math.floor(one / other),
  modulo: (one, other) => one - other * Math.floor(one / other),
  bit_length: (value) => (value < 1 ? 0 : 32 - Math.clz32(value)),
  comb(all, some) {
    let ways = 1;
    for (let at = 1; at <= some; at += 1) ways = (ways * (all - some + at)) / at;
    return Math.round(ways);
  },
};
