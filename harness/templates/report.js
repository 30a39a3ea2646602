// Sort a table by the column whose heading is clicked; empty cells stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("tr.heads th")];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const rising = head.getAttribute("aria-sort") === "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.sort;
    const numeric = !head.classList.contains("text");
    const empty = (value) => value === "" || (numeric && Number.isNaN(Number(value)));
    const compare = (a, b) => empty(a) - empty(b) || (empty(a) ? 0 : (rising ? 1 : -1) * (numeric ? a - b : a.localeCompare(b, undefined, { numeric: true })));
    const body = table.tBodies[0];
    [...body.rows].sort((a, b) => compare(key(a), key(b))).forEach((row) => body.append(row));
  }));
}

// Show one figure of a group at a time; without scripts all of them are shown.
for (const group of document.querySelectorAll(".tabs")) {
  const figures = [...group.querySelectorAll("figure")];
  if (figures.length < 2) continue;
  const bar = document.createElement("div");
  bar.setAttribute("role", "tablist");
  const show = (chosen) => figures.forEach((figure, index) => {
    figure.hidden = index !== chosen;
    bar.children[index].setAttribute("aria-selected", index === chosen);
  });
  figures.forEach((figure, index) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.setAttribute("role", "tab");
    tab.textContent = figure.dataset.label;
    tab.addEventListener("click", () => show(index));
    bar.append(tab);
  });
  group.prepend(bar);
  show(0);
}
