"use strict";
// One cell's skills: the list, and the skill that the address names unfolded.
(async () => {
  const { element, load, keys, coded, short } = harness;
  const list = document.getElementById("list");
  const index = await load(list.dataset.name);
  const { update, attempt, words, copies } = index;
  const [text, summary, author, task, phase] = ["text", "summary", "author", "task", "phase"].map((name) => coded(index[name]));
  const outcome = (row) => index.success[row] ? "success" : "failure";
  const usable = (row) => index.usable[row] ? "yes" : "no";

  function episode(row) {
    const parts = [phase(row), update[row], task(row), attempt[row]];
    return `${list.dataset.episodes}#${parts.map(encodeURIComponent).join("/")}`;
  }

  const browser = harness.browse({
    root: list,
    size: update.length,
    columns: [
      { name: "update", of: (row) => update[row], show: (value) => short(value) },
      { name: "skill", kind: "text", of: (row) => text(row), show: (value, row) => index.usable[row] ? value : element("span", { class: "bad" }, "not usable") },
      { name: "after", kind: "text", of: outcome, show: (value) => element("span", { class: value === "success" ? "good" : "bad" }, value) },
      { name: "written by", kind: "text", of: author },
      { name: "episode", kind: "text", of: task, show: (value, row) => element("a", { href: episode(row) }, `${value} · ${attempt[row]}`) },
      { name: "words", of: (row) => words[row] },
      { name: "copies", of: (row) => copies[row] },
    ],
    facets: [
      { name: "update", all: "all updates", of: (row) => String(update[row]), show: (value) => `update ${value}` },
      { name: "outcome", all: "after anything", of: outcome, show: (value) => `after ${value}` },
      { name: "usable", all: "usable or not", of: usable, show: (value) => value === "yes" ? "usable" : "not usable" },
      { name: "duplicates", all: "all copies", of: (row) => index.first[row] ? "first" : index.usable[row] ? "repeat" : "none", show: (value) => ({ first: "each text once", repeat: "repeated texts", none: "no text" })[value] },
      { name: "author", all: "any author", of: author, show: (value) => `by ${value}` },
    ],
    search: (row) => `${text(row)}\n${summary(row)}\n${task(row)}`,
    open: toggle,
  });

  // Unfold a skill below its line, or fold it.
  async function toggle(row, line) {
    if (line.nextElementSibling?.classList.contains("unfolded")) return line.nextElementSibling.remove();
    const number = index.starts.findLastIndex((start) => start <= row);
    const raw = (await load(`${list.dataset.name}.${number}`))[row - index.starts[number]];
    const parts = [["Skill", text(row)], ["Summary", summary(row)], ["Raw answer", raw]].filter(([, said]) => said);
    line.after(element("tr", { class: "unfolded" }, element("td", { class: "text", colspan: line.cells.length },
      ...parts.flatMap(([name, said]) => [element("h4", {}, name), element("pre", {}, said)]),
      element("p", { class: "note" }, `update ${short(update[row])} · written by ${author(row)} · after a ${outcome(row)} · ${copies[row]} skills have this text · `,
        element("a", { href: episode(row) }, "the episode")))));
    line.nextElementSibling.scrollIntoView({ block: "nearest" });
  }

  function follow() {
    const { hash } = location;
    const row = /^#\d+$/.test(hash) ? Number(hash.slice(1)) : null;
    browser.apply(hash);
    if (hash.startsWith("#?")) list.scrollIntoView();
    if (row === null || row >= update.length) return;
    browser.show(row);
    const line = browser.line(row);
    toggle(row, line);
    line.scrollIntoView({ block: "center" });
  }

  keys({
    j: () => browser.next(1),
    k: () => browser.next(-1),
    ArrowDown: () => browser.next(1),
    ArrowUp: () => browser.next(-1),
    Enter: browser.enter,
    "/": () => browser.find(),
  });
  window.addEventListener("hashchange", () => { if (/^#(\?|\d)/.test(location.hash)) follow(); });
  follow();
})();
