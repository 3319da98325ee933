// Who talks to whom: one small graph for each topology, workers on a circle, servers in the middle.

function topologiesOf(methods) {
  const found = new Map();
  for (const method of methods) {
    const one = method.topology;
    if (!one || !list(one.nodes).length) continue;
    const key = JSON.stringify([one.name, one.note, one.nodes, one.edges]);
    if (!found.has(key)) found.set(key, { ...one, methods: [] });
    found.get(key).methods.push(method);
  }
  return [...found.values()];
}

function isServerNode(node) {
  return String(node).startsWith("server");
}

function nodePlaces(nodes, size) {
  const workers = nodes.filter((node) => !isServerNode(node)).length;
  const servers = nodes.length - workers;
  const radius = size / 2 - 16;
  let [worker, server] = [0, 0];
  return nodes.map((node) => {
    const isServer = isServerNode(node);
    const [at, count] = isServer ? [server++, servers] : [worker++, workers];
    // Two of them stand aslant: what has no width or no height cannot be scaled to the picture.
    const angle = (2 * Math.PI * at) / Math.max(1, count) - (workers > 2 ? Math.PI / 2 : 0.75 * Math.PI);
    const far = isServer ? (servers > 1 ? radius * 0.28 : 0) : nodes.length > 1 ? radius : 0;
    return [size / 2 + far * Math.cos(angle), size / 2 + far * Math.sin(angle)];
  });
}

function nodeMarks(topology, colours, size) {
  const places = nodePlaces(topology.nodes, size);
  const crowded = topology.nodes.length > 24;
  return topology.nodes.map((node, at) => ({
    id: String(at),
    name: String(node),
    x: places[at][0],
    y: places[at][1],
    symbol: isServerNode(node) ? "rect" : "circle",
    symbolSize: isServerNode(node) ? 26 : crowded ? 7 : 21,
    itemStyle: { color: isServerNode(node) ? colours.ink : colours.paper, borderColor: colours.ink, borderWidth: 1.3 },
    label: {
      show: isServerNode(node) || !crowded, formatter: isServerNode(node) ? `S${String(node).slice(7)}` : String(node),
      color: isServerNode(node) ? colours.paper : colours.ink, fontSize: 10.5, position: "inside",
    },
  }));
}

function topologyOption(topology) {
  const count = topology.nodes.length;
  const edges = list(topology.edges).filter((edge) => Array.isArray(edge) && edge.every((end) => end >= 0 && end < count));
  return (width, colours) => {
    const size = Math.min(width, 260);
    const opacity = edges.length > 150 ? 0.18 : edges.length > 60 ? 0.4 : 0.75;
    return {
      tooltip: tooltip(colours, {
        trigger: "item",
        formatter: ({ dataType, data }) => {
          if (dataType === "edge") return tooltipBox(`${topology.nodes[data.source]} – ${topology.nodes[data.target]}`, []);
          const degree = edges.filter((edge) => edge.map(String).includes(data.id)).length;
          return tooltipBox(isServerNode(data.name) ? data.name : `worker ${data.name}`, [[null, "links", String(degree)]]);
        },
      }),
      series: [{
        type: "graph",
        name: String(topology.name),
        layout: "none",
        left: (width - size) / 2 + 16,
        top: 16,
        width: size - 32,
        height: size - 32,
        silent: false,
        data: nodeMarks(topology, colours, size),
        edges: edges.map(([source, target]) => ({ source: String(source), target: String(target) })),
        lineStyle: { color: colours.faint, width: 1.2, opacity, curveness: 0 },
        emphasis: { focus: "adjacency" },
      }],
    };
  };
}

function topologySection() {
  const found = topologiesOf(shownMethods());
  const figures = found.map((topology, at) => {
    const users = enumerate(topology.methods.map((method) => method.label));
    return figure(`topology-${at}`, {
      title: `${topology.name}: ${users}`,
      caption: topology.note || `The links that ${users} may use.`,
      height: (width) => Math.min(width, 260),
      option: topologyOption(topology),
      numbers: () => ({
        titles: ["who", "linked with"],
        rows: topology.nodes.map((node, index) => [isServerNode(node) ? String(node) : `worker ${node}`,
          enumerate(list(topology.edges).filter((edge) => edge.includes(index))
            .map((edge) => String(topology.nodes[edge[0] === index ? edge[1] : edge[0]])))]),
      }),
    });
  });
  const small = figures.length ? arrange(kept("small topologies", () => make("div", { class: "small" })), figures) : null;
  return section("topology", "Who talks to whom", "", small);
}
