"use strict";
// One cell's episodes: the list, and the episode that the address names.
(async () => {
  const { element, load, keys, coded, short } = harness;
  const list = document.getElementById("list");
  const page = document.getElementById("episode");
  const missing = document.getElementById("missing");

  const index = await load(list.dataset.name);
  const { update, attempt } = index;
  const [phase, task, kind, outcome, ending] = ["phase", "task", "kind", "outcome", "stop_reason"].map((name) => coded(index[name]));
  const parts = (row) => [phase(row), update[row], task(row), attempt[row]];
  const address = (row) => `#${parts(row).map(encodeURIComponent).join("/")}`;
  const rowOf = new Map(update.map((_, row) => [parts(row).join("\n"), row]));

  const mood = (value) => element("span", { class: value === "success" ? "good" : "bad" }, value);
  const browser = harness.browse({
    root: list,
    size: update.length,
    columns: [
      { name: "phase", kind: "text", of: phase },
      { name: "update", of: (row) => update[row], show: (value) => short(value) },
      { name: "task", kind: "text", of: task, show: (value, row) => element("a", { href: address(row) }, value) },
      { name: "kind", kind: "text", of: kind },
      { name: "attempt", of: (row) => attempt[row] },
      { name: "outcome", kind: "text", of: outcome, show: mood },
      { name: "ended by", kind: "text", of: ending },
      { name: "steps", of: (row) => index.steps[row] },
      { name: "reward", of: (row) => index.reward[row], show: (value) => short(value, 2) },
      ...(index.shift.some((value) => value !== null) ? [{ name: "Σ shift", of: (row) => index.shift[row], show: (value) => short(value) }] : []),
    ],
    facets: [
      { name: "phase", all: "all phases", of: phase },
      { name: "update", all: "all updates", of: (row) => String(update[row]), show: (value) => `update ${value}` },
      { name: "outcome", all: "all outcomes", of: outcome },
      { name: "kind", all: "all kinds", of: kind },
      { name: "stop_reason", all: "any end", of: ending },
      { name: "credit", all: "any credit", of: (row) => index.credit[row] ? "with" : "without", show: (value) => `${value} credit` },
    ],
    search: task,
    open: (row) => { location.hash = address(row); },
  });

  // ------------------------------------------------------------------------------------------- one episode

  let credit = null; // the credit view of the open episode
  let open = null; // row of the open episode

  async function show(row) {
    open = row;
    missing.textContent = "";
    const number = index.starts.findLastIndex((start) => start <= row);
    const { texts, episodes } = await load(`${list.dataset.name}.${number}`);
    if (open !== row) return; // another one was asked for meanwhile
    const episode = episodes[row - index.starts[number]];
    const own = index.skill[row];
    const written = own !== null && page.dataset.skills
      && element("p", { class: "note" }, element("a", { href: `${page.dataset.skills}#${own}` }, "Skill written about this episode"));
    credit = episode.credit ? harness.credit(episode, texts, index.scale, written) : null;
    const steps = element("div", { class: "steps" }, ...episode.response.map((_, n) => step(episode, texts, n)));
    page.replaceChildren(...header(row, episode, texts), ...(written && !credit ? [written] : []),
      element("div", { class: credit ? "beside" : "" }, credit?.panel, steps));
    credit?.start();
    list.hidden = true;
    page.hidden = false;
    window.scrollTo(0, 0);
  }

  function header(row, episode, texts) {
    const rows = browser.rows();
    const at = rows.indexOf(row);
    const facts = [
      phase(row), `update ${short(update[row])}`, `attempt ${attempt[row]}`, kind(row), `ended by ${ending(row)}`,
      `${index.steps[row]} steps`, `reward ${short(index.reward[row])}`, `score ${short(index.score[row])}`,
      episode.sampled_tokens && `${episode.sampled_tokens} tokens sampled`,
      episode.dropped_turns && `${episode.dropped_turns} turns dropped from prompts`,
    ].filter(Boolean);
    const move = (by, label, key) => element("button", { type: "button", onclick: () => neighbour(by), disabled: at < 0 || rows[at + by] === undefined },
      label, " ", element("kbd", {}, key));
    return [
      element("div", { class: "bar" },
        element("button", { type: "button", onclick: close }, "List ", element("kbd", {}, "Esc")),
        move(-1, "Previous", "k"), move(1, "Next", "j"),
        element("span", { class: "meta" }, at < 0 ? "not among the listed ones" : `${at + 1} of ${rows.length} listed`)),
      element("h2", { class: "task" }, task(row)),
      element("p", { class: "facts" }, mood(outcome(row)), ` · ${facts.join(" · ")}`),
      element("p", { class: "tasktext" }, texts[episode.task_text] ?? ""),
      element("p", { class: "bad" }, texts[episode.error] ?? ""),
      ...(texts[episode.traceback] ? [element("pre", { class: "traceback" }, texts[episode.traceback])] : []),
    ];
  }

  function step(episode, texts, n) {
    const valid = episode.valid[n];
    const facts = element("span", { class: "meta" },
      "action ", element("code", {}, texts[episode.action[n]] || "–"),
      valid ? " · valid" : element("span", { class: "bad" }, " · invalid"),
      episode.reward[n] ? ` · reward ${short(episode.reward[n])}` : "",
      ...(credit ? credit.mask(n).map((word) => element("span", { class: "chip" }, word)) : []));
    const seen = episode.prompt ? prompt(episode, texts, n) : observation(texts[episode.observation[n]]);
    return element("section", { class: "step", id: `step-${n + 1}` },
      element("h3", {}, `Step ${n + 1} `, facts), seen,
      credit?.response(n) ?? element("pre", { class: "response" }, texts[episode.response[n]]));
  }

  const observation = (seen) => seen ? element("pre", { class: "seen" }, seen) : null;

  // The prompt line by line: pictures in their places, runs of lines that the step before had too folded away.
  function prompt(episode, texts, n) {
    const before = new Set(n ? texts[episode.prompt[n - 1]].split("\n") : []);
    const pictures = episode.pictures[n].values();
    const known = (line) => before.has(line) && !line.includes("<image>");
    const box = element("div", { class: "prompt" });
    let run = [];
    const flush = () => {
      const lines = run.map((line) => element("div", { class: "old" }, line));
      box.append(...(run.length < 4 ? lines
        : [element("details", {}, element("summary", {}, `${run.length} lines as in step ${n}`), ...lines)]));
      run = [];
    };
    for (const line of texts[episode.prompt[n]].split("\n")) {
      if (known(line)) run.push(line);
      else {
        flush();
        box.append(element("div", {}, ...line.split("<image>").flatMap((part, k) => k ? [picture(pictures.next().value), part] : [part])));
      }
    }
    flush();
    return box;
  }

  // A picture at about one size: small ones enlarged pixel by pixel by a whole number.
  function picture(name) {
    const size = ({ target }) => {
      const width = target.naturalWidth;
      target.width = width < 168 ? width * Math.round(168 / width) : Math.min(width, 224);
      target.classList.toggle("enlarged", width < 168);
    };
    return element("img", { src: page.dataset.pictures + encodeURIComponent(name), alt: `picture ${name}`, onload: size });
  }

  function neighbour(by) {
    const rows = browser.rows();
    const row = rows[rows.indexOf(open) + by];
    if (row === undefined) return;
    history.replaceState(null, "", address(row));
    show(row);
  }

  // Back to the list, at the episode that was open.
  function leave() {
    const row = open;
    open = credit = null;
    page.hidden = true;
    page.replaceChildren();
    list.hidden = false;
    if (row !== null) browser.show(row);
  }

  function close() {
    history.replaceState(null, "", browser.address());
    leave();
  }

  // --------------------------------------------------------------------------------------- address and keys

  function follow() {
    const { hash } = location;
    if (hash === "" || hash.startsWith("#?")) {
      missing.textContent = "";
      if (browser.address() !== (hash || "#")) browser.apply(hash);
      return leave();
    }
    const asked = hash.slice(1).split("/").map(decodeURIComponent);
    const row = rowOf.get(asked.join("\n"));
    if (row !== undefined) return show(row);
    if (asked.length < 4) return undefined; // a place on the page
    missing.textContent = `No episode ${asked.join(" · ")} is on this page.`;
    return leave();
  }

  const NOT_HERE = false; // what an action answers that has nothing to do
  const either = (inList, inEpisode) => (event) => open === null ? inList(event) : inEpisode(event);
  const credited = (action) => () => credit ? action() : NOT_HERE;
  keys({
    j: either(() => browser.next(1), () => neighbour(1)),
    k: either(() => browser.next(-1), () => neighbour(-1)),
    ArrowDown: either(() => browser.next(1), credited(() => credit.jump(1))),
    ArrowUp: either(() => browser.next(-1), credited(() => credit.jump(-1))),
    ArrowRight: credited(() => credit.move(1)),
    ArrowLeft: credited(() => credit.move(-1)),
    t: credited(() => credit.cycle()),
    Enter: either(browser.enter, () => NOT_HERE),
    "/": either(() => browser.find(), () => NOT_HERE),
    Escape: either(() => NOT_HERE, close),
  });
  browser.apply("");
  window.addEventListener("hashchange", follow);
  await follow();
})();
