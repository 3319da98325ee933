// The cluster: machines hang from the switch of their rack or site; slow ones and slow links carry words and
// shapes of their own.

function machineBadges(machine) {
  const badges = [];
  if (isNumber(machine.slow) && machine.slow > 1) badges.push(["slow", `◆ ${showTick(machine.slow)}× slower`]);
  if (isNumber(machine.slow_link) && machine.slow_link > 1) badges.push(["link", `≋ link ${showTick(machine.slow_link)}× slower`]);
  if (machine.dies) badges.push(["dies", "✕ dies"]);
  return badges;
}

function machineBox(machine) {
  const badges = machineBadges(machine);
  const kinds = badges.map(([kind]) => `is-${kind}`).join(" ");
  const workers = list(machine.workers);
  const chips = workers.slice(0, 16).map((worker) => make("span", { class: "chip" }, String(worker)));
  if (workers.length > 16) chips.push(make("span", { class: "chip" }, `+${workers.length - 16}`));
  return make("li", { class: `machine ${kinds}`.trim() },
    make("span", { class: "wire", "aria-hidden": "true" }),
    make("div", { class: "box" },
      make("b", null, String(machine.name)),
      make("div", { class: "chips", "aria-label": `workers ${enumerate(workers.map(String))}` }, chips),
      badges.map(([kind, words]) => make("div", { class: `badge ${kind}` }, words)),
      list(machine.notes).map((note) => make("div", { class: "note" }, String(note)))));
}

function rackBox(place, machines, isOnly) {
  const box = make("div", { class: "rack" },
    make("div", { class: "switch" }, isOnly ? "switch" : place),
    make("ul", { class: "machines" }, machines.map(machineBox)));
  box.style.setProperty("--machines", machines.length);
  return box;
}

function clusterFacts(cluster) {
  const facts = [["workers", isNumber(cluster.workers) ? cluster.workers : null], ["servers", cluster.servers || null],
    ["a step", cluster.step], ["bandwidth", cluster.bandwidth], ["latency", cluster.latency]];
  return make("dl", { class: "facts" }, facts.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => make("div", null, make("dt", null, name), make("dd", null, String(value)))));
}

function clusterSection() {
  const cluster = state.data.cluster;
  if (!cluster) return null;
  const racks = new Map();
  for (const machine of list(cluster.machines)) {
    const place = String(machine.place || "");
    racks.set(place, [...(racks.get(place) || []), machine]);
  }
  const drawn = kept("cluster", () => make("div", { class: "cluster" }));
  const notes = list(cluster.notes);
  drawn.replaceChildren(
    clusterFacts(cluster),
    ...(racks.size ? [make("div", { class: "racks" },
      [...racks].map(([place, machines]) => rackBox(place, machines, racks.size === 1)))] : []),
    ...(notes.length ? [make("ul", { class: "notes" }, notes.map((note) => make("li", null, String(note))))] : []));
  drawn.querySelector(".racks")?.classList.toggle("crowded", list(cluster.machines).length > 24);
  const heading = cluster.name ? `The cluster: ${cluster.name}` : "The cluster";
  return section("cluster", heading, cluster.title || "", drawn);
}
