"use strict";
// A long list inside `root`: filtered, sorted, drawn in slices, driven by keys.
//   size     number of rows; a row is its number
//   columns  [{ name, of: row => value, kind: "text" or nothing for numbers, show: (value, row) => text or element }]
//   facets   [{ name, all: "all phases", of: row => text, show: text => text }], a choice each
//   search   row => the text in which the search field looks
//   open     called with a row on Enter or a click
harness.browse = ({ root, size, columns, facets, search, open }) => {
  const { element } = harness;
  const SLICE = 200; // rows drawn at once
  const every = Array.from({ length: size }, (_, row) => row);

  const field = element("input", { type: "search", name: "search", placeholder: "search …", "aria-label": "Search" });
  const choices = facets.map((facet) => {
    const counts = new Map();
    for (const row of every) counts.set(facet.of(row), (counts.get(facet.of(row)) ?? 0) + 1);
    const options = [...counts].map(([value, count]) => element("option", { value }, `${facet.show?.(value) ?? value} (${count})`));
    return element("select", { name: facet.name, "aria-label": facet.all, hidden: counts.size < 2 }, element("option", { value: "" }, facet.all), ...options);
  });
  const count = element("span", { class: "count", role: "status" });
  const filters = element("form", { class: "bar filters", role: "search" }, field, ...choices, element("button", { type: "reset" }, "Clear"), count);
  const heads = columns.map((column) => element("th", { scope: "col", class: column.kind ?? "number" },
    element("button", { type: "button", onclick: () => sort(column) }, column.name)));
  const body = element("tbody");
  const table = element("table", { class: "browse" }, element("thead", {}, element("tr", {}, ...heads)), body);
  const more = element("button", { type: "button", class: "more", onclick: () => draw() });
  const help = element("p", { class: "note keys" }, element("kbd", {}, "j"), " ", element("kbd", {}, "k"), " or arrows select · ",
    element("kbd", {}, "Enter"), " opens · ", element("kbd", {}, "/"), " searches · a heading sorts");
  root.append(filters, help, element("div", { class: "scroll" }, table), more);

  let rows = every; // those that pass the filters, in the order shown
  let lines = []; // their table rows, as far as drawn
  let selected = 0; // position in rows
  let order = null; // { column, rising }

  function sort(column) {
    order = { column, rising: order?.column === column ? !order.rising : column.kind === "text" };
    heads.forEach((head, n) => columns[n] === column
      ? head.setAttribute("aria-sort", order.rising ? "ascending" : "descending") : head.removeAttribute("aria-sort"));
    refresh();
  }

  function refresh() {
    const wanted = facets.map((facet, n) => [facet.of, choices[n].value]).filter(([, value]) => value !== "");
    const words = field.value.trim().toLowerCase();
    rows = every.filter((row) => wanted.every(([of, value]) => of(row) === value) && (!words || search(row).toLowerCase().includes(words)));
    if (order) {
      const { column: { of, kind }, rising } = order;
      const compare = (a, b) => kind === "text" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
      const last = (value) => value === null;
      rows.sort((a, b) => last(of(a)) - last(of(b)) || (last(of(a)) ? 0 : (rising ? 1 : -1) * compare(of(a), of(b))));
    }
    count.textContent = `${rows.length.toLocaleString("en")} of ${size.toLocaleString("en")}`;
    body.replaceChildren();
    lines = [];
    draw();
    select(0, false);
  }

  function draw() {
    const part = rows.slice(lines.length, lines.length + SLICE).map((row) => element("tr", { "data-row": row },
      ...columns.map(({ of, kind, show }) => element("td", { class: kind ?? "number" }, show ? show(of(row), row) : String(of(row) ?? "")))));
    body.append(...part);
    lines.push(...part);
    const left = rows.length - lines.length;
    more.hidden = !left;
    more.textContent = `Show ${Math.min(SLICE, left)} more of ${left}`;
  }

  function select(position, scroll = true) {
    lines[selected]?.removeAttribute("aria-selected");
    selected = Math.max(0, Math.min(position, rows.length - 1));
    while (selected >= lines.length && lines.length < rows.length) draw();
    lines[selected]?.setAttribute("aria-selected", "true");
    if (scroll) lines[selected]?.scrollIntoView({ block: "nearest" });
  }

  // The filters as the end of an address, and back: "#?phase=eval&update=20".
  function address() {
    const given = [...new FormData(filters)].filter(([, value]) => value !== "");
    return given.length ? `#?${new URLSearchParams(given)}` : "#";
  }
  function apply(hash) {
    const given = new URLSearchParams(hash.startsWith("#?") ? hash.slice(2) : "");
    for (const control of [field, ...choices]) control.value = given.get(control.name) ?? "";
    refresh();
  }
  const changed = () => { refresh(); history.replaceState(null, "", address()); };

  filters.addEventListener("input", changed);
  filters.addEventListener("reset", () => setTimeout(changed)); // the fields are emptied after the event
  filters.addEventListener("submit", (event) => event.preventDefault());
  field.addEventListener("keydown", (event) => { if (["Escape", "Enter"].includes(event.key)) field.blur(); });
  body.addEventListener("click", (event) => {
    const line = event.target.closest("tr[data-row]");
    if (!line || event.target.closest("a, button, summary")) return;
    select(lines.indexOf(line), false);
    open(Number(line.dataset.row), line);
  });
  new IntersectionObserver(([seen]) => { if (seen.isIntersecting && !more.hidden) draw(); }, { rootMargin: "600px" }).observe(more);

  return {
    apply, address, select,
    rows: () => rows,
    next: (by) => select(selected + by),
    show: (row) => select(Math.max(0, rows.indexOf(row))),
    enter: (event) => event.target.closest("a, button, summary") || !rows.length ? false : open(rows[selected], lines[selected]),
    line: (row) => lines[rows.indexOf(row)],
    find: () => field.focus(),
  };
};

// Texts of which many are equal, as data files hold them: row => text.
harness.coded = ({ values, codes }) => (row) => values[codes[row]];
// A number as short as it gets, with a real minus sign.
harness.short = (value, digits = 3) => value === null || value === undefined ? "" : String(Number(value.toFixed(digits))).replace("-", "−");
