// The way around a long page: links to its sections, and hints at what goes on beyond an edge.

const FEWEST_SECTIONS = 4;

function contentsLink(one) {
  const heading = one.querySelector("h2").textContent;
  const link = kept(`contents ${one.id}`, () => make("a", { href: `#${one.id}`, click: () => {
    // Who goes to what is folded wants to read it.
    const inside = document.querySelector(`#${one.id} details.folded`);
    if (inside) inside.open = true;
  } }));
  return setText(link, heading);
}

function contents(sections) {
  const shown = sections.filter((one) => one);
  if (shown.length < FEWEST_SECTIONS) return null;
  const element = kept("contents", () => make("nav", { class: "contents", "aria-label": "Contents" }));
  return arrange(element, shown.map(contentsLink));
}

// An edge that fades says that there is more beyond it.
function markMore(box) {
  box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 4);
}

const scrolling = new ResizeObserver((entries) => {
  requestAnimationFrame(() => entries.forEach(({ target }) => markMore(target)));
});

function hintAtMore() {
  for (const box of document.querySelectorAll(".legend, .table")) {
    if (!box.dataset.watched) {
      box.dataset.watched = "yes";
      box.addEventListener("scroll", () => markMore(box), { passive: true });
      scrolling.observe(box);
    }
    markMore(box);
  }
}
