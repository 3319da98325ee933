// The step of a method at the values of the sliders. The forms themselves are translated from
// Python; here is what they are given, and what follows from a step. Nothing here knows the page.

const OWN_PERIOD = 0;
const MOST_STORED = 4000;

function deviation(compute) {
  return compute.seconds * compute.known.deviation;
}

// Compute times vary in proportion to their mean, so one table of the means in order serves all.
function order_means(compute, count) {
  const { deviation: spread, orders, largest } = compute.known;
  if (!spread) return Array.from({ length: count }, () => compute.seconds);
  const known = orders[count] || [largest[count]];
  return known.map((mean) => mean * compute.seconds);
}

let normals = {};

function expected_largest_normal(count) {
  return normals[count];
}

function Crossing(axis, value, faster, slower) {
  return { axis, value, faster, slower };
}

class CostModel {
  constructor(known) {
    this.known = known;
    this.stored = new Map();
    normals = known.compute.normals;
    for (const method of known.methods) {
      for (const place of Object.values(method.places)) {
        if (place.refused) continue;
        place.machines = new Machines(...place.machines);
        place.inside = place.inside && new Machines(...place.inside);
      }
    }
  }

  modelBytes(values) {
    return (values.parameters * values.bits) / 8;
  }

  gradientSeconds(values) {
    return values.fixed + values.per_sample * values.batch;
  }

  workload(values) {
    const own = this.known.workload;
    const modelBytes = this.modelBytes(values);
    return {
      model_bytes: modelBytes,
      pieces: pieces_of(modelBytes, own.tensors, own.costs),
      scalar_bytes: (own.scalar_bytes * modelBytes) / own.model_bytes,
      optimiser_slots: own.optimiser_slots,
    };
  }

  caseAt(method, values) {
    const place = method.places[values.workers];
    if (!place) throw new NoClosedForm(`${method.label} with ${values.workers} workers is not on this page`);
    if (place.refused) throw new NoClosedForm(place.refused);
    const compute = { ...this.known.compute.own, seconds: this.gradientSeconds(values), known: this.known.compute };
    const wires = { ...this.known.wires, bandwidth: values.bandwidth, latency: values.latency };
    return case_of({ ...place, options: this.options(method, place, values) }, compute, wires, this.workload(values));
  }

  // The slider of the period sets whatever says how many steps a method works alone.
  options(method, place, values) {
    if (values.period === OWN_PERIOD) return place.options;
    return { ...place.options, ...Object.fromEntries(method.periods.map((name) => [name, values.period])) };
  }

  // {parts, step, speed, waits, notes}, or {refused} with the reason.
  step(method, values) {
    try {
      const one = this.caseAt(method, values);
      const parts = FORMS[method.name](one);
      const step = parts.total_s;
      // Where some go on while others wait, the mean worker computes for this part of its time.
      return { parts, step, speed: (values.workers * values.batch) / step, notes: notes_of(method.name, parts, one), computing: Math.min(1, parts.compute_s / step) };
    } catch (error) {
      if (error instanceof ConfigurationError) return { refused: error.message };
      throw error;
    }
  }

  // Samples per second without waiting for anybody.
  speedAlone(values) {
    const compute = { ...this.known.compute.own, seconds: this.gradientSeconds(values), known: this.known.compute };
    return values.batch / new ComputeTime(compute).mean_s;
  }

  // As a function of one slider, remembered: crossings ask for the same values again and again.
  speedOver(axis, values) {
    const methods = new Map(this.known.methods.map((one) => [one.label, one]));
    const others = JSON.stringify({ ...values, [axis]: null });
    if (this.stored.size > MOST_STORED) this.stored.clear();
    return (label, value) => {
      const key = `${label} ${axis} ${value} ${others}`;
      if (!this.stored.has(key)) {
        const whole = axis === "batch" ? Math.max(1, py.round(value)) : value;
        const found = this.step(methods.get(label), { ...values, [axis]: whole });
        this.stored.set(key, found.refused ? null : found.speed);
      }
      return this.stored.get(key);
    };
  }

  crossings(axis, labels, grid, values) {
    const found = order_changes(axis, labels, grid, this.speedOver(axis, values), () => this.known.tie);
    return found.sort((one, other) => one.value - other.value);
  }

  // The bytes of a worker, and what it has; null where nobody knows what a step holds.
  memory(method, values) {
    const place = method.places[values.workers];
    const room = this.known.room;
    if (!room || !place || place.refused) return null;
    const model = values.parameters * room.parameter_bytes;
    const held = model * (2 + room.slots + place.copies) + room.fixed_bytes;
    return { bytes: held + this.activations(values.batch), has: room.has };
  }

  // Measured at some batches, and straight lines between and beyond them.
  activations(batch) {
    const points = this.known.room.activations;
    if (points.length < 2) return points.length ? points[0][1] : 0;
    const after = points.findIndex(([at]) => at >= batch);
    const upper = after < 0 ? points.length - 1 : Math.max(1, after);
    const [[low, least], [high, most]] = [points[upper - 1], points[upper]];
    return Math.max(0, least + ((most - least) * (batch - low)) / (high - low));
  }

  // What one epoch costs, without egress: which bytes leave a machine has no closed form.
  epoch(values, step) {
    const { price } = this.known;
    const seconds = this.known.workload.samples / step.speed;
    if (!price) return { seconds };
    const watts = step.computing * price.watts + (1 - step.computing) * price.idle_watts;
    return { seconds, dollars: seconds * price.per_second[values.workers], joules: seconds * values.workers * watts };
  }
}
