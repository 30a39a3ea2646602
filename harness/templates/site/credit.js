"use strict";
// The credit view: every response token coloured by what one of four quantities says about it.
harness.credit = (() => {
  const { element, short } = harness;

  // Each quantity: its name, symbol, meaning, and its value at token i of a step (null where it has none).
  const QUANTITIES = {
    shift: {
      name: "Shift", symbol: "D", meaning: "the teacher's log-prob of the token minus the policy's own; blue: with the skill it is likelier",
      at: (step, i) => step.teacher && step.teacher[i] !== null ? step.teacher[i] - step.logp[i] : null,
    },
    gate: {
      name: "Gate", symbol: "g", meaning: "sigmoid of the sharpened shift, by which the token weighs in the distillation term (2g − 1 where it is centred)",
      at: (step, i) => step.gate ? step.gate[i] : null,
    },
    advantage: {
      name: "Advantage before", symbol: "A", meaning: "of the whole row, from the outcomes alone",
      at: (step) => step.in_policy ? step.advantage : null,
    },
    pull: {
      name: "Advantage after", symbol: "A′", meaning: "−dL/dl of policy gradient and distillation together, in units in which the policy gradient alone gives A",
      at: (step, i) => step.pull ? step.pull[i] : null,
    },
  };

  let colouring = "shift"; // stays from episode to episode

  const plain = (value, digits = 3) => value === null || value === undefined ? "–"
    : value.toFixed(digits).replace(/^-(0\.0+)$/, "$1").replace("-", "−");
  const signed = (value) => (value >= 0.0005 ? "+" : "") + plain(value);
  const shown = (name, value) => name === "gate" ? plain(value) : signed(value);

  // How deep a value is coloured on a scale [low, mid, high], from -1 to 1. The root lets small values be seen too.
  function depth(value, [low, middle, high]) {
    const part = Math.max(-1, Math.min(1, (value - middle) / (value < middle ? middle - low : high - middle)));
    return Math.abs(part) < 0.005 ? 0 : Math.sign(part) * Math.sqrt(Math.abs(part));
  }

  function paint(target, value, scale) {
    const colour = value === null || value === undefined || !scale ? 0 : depth(value, scale);
    target.classList.toggle("up", colour > 0);
    target.classList.toggle("down", colour < 0);
    target.style.setProperty("--amount", Math.abs(colour).toFixed(3));
  }

  // A token as it is read: what has no ink gets a sign.
  function visible(text) {
    if (text === "") return "∅";
    return /^ +$/.test(text) ? "␣".repeat(text.length) : text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥");
  }

  // Sum of a quantity over the tokens of some steps; null where no token has it.
  function total(steps, name) {
    const values = steps.flatMap((step) => step.tokens.map((_, i) => QUANTITIES[name].at(step, i))).filter((v) => v !== null);
    if (!values.length) return null;
    const sum = values.reduce((a, b) => a + b, 0);
    return name === "gate" ? sum / values.length : sum;
  }

  // Whether a row that some term uses was left out; a row that none uses is not trained on either.
  const cut = (step) => !step.chosen && (step.in_policy || step.in_distill);

  function mask(step) {
    return [
      step.in_policy ? "policy gradient" : "no policy gradient",
      step.in_distill ? "distilled" : "not distilled",
      ...(cut(step) ? ["cut by max_rows"] : []),
    ];
  }

  // The view of one episode: its panel, its responses token by token, and what the keys do.
  return function view(episode, texts, scale, ownSkill) {
    const steps = new Map(episode.credit.map((step) => [step.step, step]));
    const names = Object.keys(QUANTITIES).filter((name) => scale[name]);
    if (!names.includes(colouring)) colouring = names[0];
    const tokens = []; // { span, step, i }, in reading order
    let focused = 0;

    const buttons = names.map((name) => element("button", { type: "button", "data-colouring": name, onclick: () => choose(name) }, QUANTITIES[name].name));
    const legend = element("div", { class: "legend" });
    const inspector = element("dl", { class: "inspector", id: "token", "aria-live": "polite" });

    function choose(name) {
      colouring = name;
      buttons.forEach((button) => button.setAttribute("aria-pressed", button.dataset.colouring === name));
      tokens.forEach(({ span, step, i }) => paint(span, QUANTITIES[name].at(step, i), scale[name]));
      legend.replaceChildren(...legendOf(name));
    }

    function legendOf(name) {
      const [low, middle, high] = scale[name];
      const swatches = Array.from({ length: 9 }, (_, n) => {
        const swatch = element("span", { class: "token" });
        const t = n / 4 - 1;
        paint(swatch, t < 0 ? middle + t * (middle - low) : middle + t * (high - middle), scale[name]);
        return swatch;
      });
      const marks = [low, (low + middle) / 2, middle, (middle + high) / 2, high];
      const ends = marks.map((value) => element("span", {}, (value > 0 && middle === 0 ? "+" : "") + short(value, 6)));
      return [
        element("div", { class: "swatches", "aria-hidden": "true" }, ...swatches),
        element("div", { class: "ends" }, ...ends),
        element("p", { class: "note" }, `${QUANTITIES[name].name} ${QUANTITIES[name].symbol}: ${QUANTITIES[name].meaning}. The colour does not go beyond the ends.`),
      ];
    }

    function inspect({ step, i }) {
      const value = (name) => QUANTITIES[name].at(step, i);
      const rows = [
        [`step ${step.step + 1}`, `${JSON.stringify(texts[step.tokens[i]])} · id ${step.ids[i]} · ${i + 1} of ${step.tokens.length}`],
        ["policy", plain(step.logp?.[i])],
        ["teacher", plain(step.teacher?.[i])],
        ["shift D", signed(value("shift"))],
        ["gate g", plain(value("gate"))],
        ["A before", signed(value("advantage"))],
        ["A′ after", signed(value("pull"))],
        ["mask", mask(step).join(", ")],
      ];
      inspector.replaceChildren(...rows.map(([name, text]) => element("div", { "data-value": name }, element("dt", {}, name), element("dd", {}, text))));
    }

    function focus(number) {
      if (!tokens[number]) return;
      tokens[focused].span.tabIndex = -1;
      focused = number;
      tokens[number].span.tabIndex = 0;
      tokens[number].span.focus();
    }

    // The tokens of one step's response, to be put in place of its text.
    function response(number) {
      const step = steps.get(number);
      if (!step) return null;
      const spans = step.tokens.map((text, i) => {
        const order = tokens.length;
        const span = element("span", {
          class: "token", tabindex: order ? -1 : 0,
          onmouseenter: () => inspect(tokens[order]),
          onmouseleave: () => inspect(tokens[focused]),
          onfocus: () => { focused = order; inspect(tokens[order]); },
          onclick: () => focus(order),
        }, visible(texts[text]));
        tokens.push({ span, step, i });
        paint(span, QUANTITIES[colouring].at(step, i), scale[colouring]);
        return span;
      });
      return element("div", { class: `tokens${cut(step) ? " cut" : ""}` }, ...spans);
    }

    function sums() {
      const rows = [...steps.values()].sort((a, b) => a.step - b.step);
      const cells = (some) => names.map((name) => element("td", {}, shown(name, total(some, name))));
      const line = (step) => element("tr", {},
        element("th", { scope: "row" }, element("button", { type: "button", onclick: () => document.getElementById(`step-${step.step + 1}`).scrollIntoView({ block: "center" }) }, step.step + 1)),
        ...cells([step]));
      const heads = names.map((name) => element("th", { scope: "col", title: QUANTITIES[name].name }, name === "gate" ? "mean g" : `Σ ${QUANTITIES[name].symbol}`));
      return element("table", { class: "sums", id: "sums" },
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "step"), ...heads)),
        element("tbody", {}, element("tr", { class: "total" }, element("th", { scope: "row" }, "episode"), ...cells(rows)), ...rows.map(line)));
    }

    function skills() {
      if (!episode.read.length) return [element("p", { class: "note" }, "No skill: no teacher read one for this episode.")];
      return episode.read.map((text) => element("blockquote", {}, texts[text]));
    }

    const panel = element("div", { class: "panel", role: "complementary", "aria-label": "Token credit" },
      element("h3", {}, "Colour of the tokens ", element("kbd", {}, "t")),
      element("div", { class: "choices", role: "group", "aria-label": "Colour by" }, ...buttons),
      legend,
      element("h3", {}, "Skill that the teacher read"), ...skills(), ownSkill,
      element("div", { class: "token-box" }, element("h3", {}, "Token ", element("kbd", {}, "←"), " ", element("kbd", {}, "→")), inspector),
      element("h3", {}, "Sums"), element("div", { class: "sumbox" }, sums()));

    return {
      panel,
      response,
      mask: (number) => steps.has(number) ? mask(steps.get(number)) : [],
      start: () => { choose(colouring); if (tokens.length) inspect(tokens[0]); },
      cycle: () => choose(names[(names.indexOf(colouring) + 1) % names.length]),
      move: (by) => focus(document.activeElement === tokens[focused]?.span ? focused + by : focused),
      jump: (by) => { // to the first token of the step before or after
        const here = tokens[focused]?.step;
        const starts = tokens.flatMap((token, order) => token.i === 0 ? [order] : []);
        const now = starts.findIndex((order) => tokens[order].step === here);
        focus(starts[now + by]);
      },
    };
  }
})();
