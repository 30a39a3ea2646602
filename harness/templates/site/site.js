"use strict";
// What all pages share: data files, elements made of text alone, keys, sorted tables, tabs.
const harness = (() => {
  const folder = new URL("../data/", document.currentScript.src);
  const arrived = new Map(); // name -> value
  const asked = new Map(); // name -> { promise, resolve }

  // Called by every data file.
  function receive(name, value) {
    arrived.set(name, value);
    asked.get(name)?.resolve(value);
  }

  // The value of report/data/NAME.js; its script is added to the page where it is not there yet.
  function load(name) {
    if (arrived.has(name)) return Promise.resolve(arrived.get(name));
    if (!asked.has(name)) {
      let resolve;
      const promise = new Promise((done, fail) => {
        resolve = done;
        const script = document.createElement("script");
        script.src = new URL(`${encodeURIComponent(name)}.js`, folder);
        script.onerror = () => fail(new Error(`report/data/${name}.js is missing`));
        document.head.append(script);
      });
      asked.set(name, { promise, resolve });
    }
    return asked.get(name).promise;
  }

  // Characters that steer a terminal or reorder a line, as signs: nobody shall copy an escape sequence unseen.
  const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]/g,
    (sign) => sign < " " ? String.fromCharCode(0x2400 + sign.charCodeAt(0)) : `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);

  // element("p", { class: "meta", onclick: f }, "text", child, ...): strings become text, never markup.
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    const there = children.filter((child) => child !== null && child !== undefined && child !== false);
    made.append(...there.map((child) => typeof child === "string" ? visible(child) : child));
    return made;
  }

  // keys({ j: next, ArrowLeft: back }): single keys, unless something is being typed or a modifier is held.
  function keys(actions) {
    document.addEventListener("keydown", (event) => {
      const typing = event.target.closest?.("input, select, textarea");
      if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const action = actions[event.key];
      if (action && action(event) !== false) event.preventDefault();
    });
  }

  // Sort a table by the column whose heading is clicked; empty cells stay last.
  function sortable(table) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort;
      const numeric = !head.classList.contains("text");
      const empty = (value) => value === "" || (numeric && Number.isNaN(Number(value)));
      const order = (a, b) => numeric ? a - b : a.localeCompare(b, undefined, { numeric: true });
      const compare = (a, b) => empty(a) - empty(b) || (empty(a) ? 0 : (rising ? 1 : -1) * order(a, b));
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b))));
    }));
  }

  // Show one figure of a group at a time; without scripts, and in print, all of them are shown.
  function tabs(group) {
    const figures = [...group.querySelectorAll("figure")];
    if (figures.length < 2) return;
    const buttons = figures.map((figure) => element("button", { type: "button", role: "tab" }, figure.dataset.label));
    const show = (chosen) => buttons.forEach((button, index) => {
      figures[index].classList.toggle("behind", index !== chosen);
      button.setAttribute("aria-selected", index === chosen);
      button.tabIndex = index === chosen ? 0 : -1;
    });
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    buttons.forEach((button, index) => {
      button.addEventListener("click", () => show(index));
      button.addEventListener("keydown", (event) => {
        if (!(event.key in steps)) return;
        const last = buttons.length - 1;
        const next = Number.isFinite(steps[event.key])
          ? (index + steps[event.key] + buttons.length) % buttons.length
          : event.key === "Home" ? 0 : last;
        show(next);
        buttons[next].focus();
        event.preventDefault();
      });
    });
    group.prepend(element("div", { role: "tablist" }, ...buttons));
    const linked = () => figures.findIndex((figure) => figure.id && `#${figure.id}` === location.hash);
    addEventListener("hashchange", () => linked() >= 0 && show(linked()));
    show(Math.max(0, linked()));
  }

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("table.sortable").forEach(sortable);
    document.querySelectorAll(".tabs").forEach(tabs);
  });

  return { receive, load, element, keys, sortable, tabs };
})();
