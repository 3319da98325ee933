// What a search recommends: the first thing on its page, and what would change it.

function adviceSection() {
  const advice = state.data.advice;
  if (!advice) return null;
  const first = kept("advice first", () => make("p", { class: "advised" }));
  setText(first, advice.next_step || "");
  const reasons = kept("advice reasons", () => make("div", { class: "advised" }));
  reasons.replaceChildren(...list(advice.reasons).map((line) => make("p", null, keepUnits(String(line)))));
  return section("advice", "What to do", "", ...(advice.command ? [first, commandBlock("train", advice.command)] : []), reasons);
}

function changesSection() {
  const advice = state.data.advice;
  if (!advice) return null;
  const changes = list(advice.changes);
  const words = kept("changes", () => make("ul", { class: "changes" }));
  words.replaceChildren(...changes.map((line) => make("li", null, keepUnits(String(line)))));
  return section("changes", "What would change the answer",
    "One property of the cluster was changed at a time, and the best methods ran again.", changes.length ? words : null,
    advice.scenes && list(advice.scenes.rows).length ? furtherTable("scenes", advice.scenes) : null);
}
