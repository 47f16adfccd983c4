import { bars, draw, element, number } from "./chart.js";
// Follows one run: asks every two seconds for the new rows of its files.

const PERIOD_MS = 2000, LIVE_S = 60;
const CHARTS = [
  ["Reward", ["reward_mean", "reward_heldout"]],
  ["Lag of trained tokens, versions", ["lag_mean", "lag_max"]],
  ["Tokens per second", ["generated_tokens_per_s", "trained_tokens_per_s"]],
  ["Seconds of a step", ["step_s", "training_s", "pause_s"]],
  ["Loss", ["loss"]],
  ["Entropy", ["entropy"]],
  ["Learner against server, KL", ["kl"]],
  ["Gap of log-probabilities at lag 0", ["logprob_gap_mean", "logprob_gap_max"]],
  ["Gradient norm", ["grad_norm"]],
  ["Tokens of a reply", ["reply_tokens_mean", "reply_tokens_max"]],
];
const NEWEST = ["reward_mean", "reward_heldout", "lag_mean", "generated_tokens_per_s", "trained_tokens_per_s", "ledger_difference"];
// Of a step, by who spends it: [who, what, metric, whether the metric is a share].
const TIMES = [
  ["trainer", "training", "training_s"], ["trainer", "waiting for groups", "groups_wait_s"], ["trainer", "publish", "publish_s"],
  ["trainer", "checkpoint", "checkpoint_s"], ["trainer", "digests", "export_s"],
  ["servers", "sampling", "servers_sampling_share", true], ["servers", "paused for weights", "servers_paused_share", true],
  ["servers", "idle", "servers_idle_share", true],
  ["next lease waits for", "a step, by max_staleness", "lease_wait_staleness_s"], ["next lease waits for", "a free place on a server", "lease_wait_slots_s"],
  ["next lease waits for", "a server that serves", "lease_wait_server_s"], ["next lease waits for", "an environment", "lease_wait_environment_s"],
  ["next lease waits for", "room in the queue", "lease_wait_queue_s"],
];
// Means of what does not add up to a step.
const BESIDE = [["queue", "a complete group, until its step", "queue_s_mean"], ["episode", "in the engine", "generation_s_mean"],
  ["episode", "in its environment", "environment_s_mean"], ["episode", "rest", "episode_rest_s_mean"]];
const CHANGES = {
  server_more: "one rollout server more", server_less: "one rollout server less", rank_more: "one data-parallel rank more",
  rank_less: "one data-parallel rank less", staleness_doubled: "max_staleness doubled", staleness_halved: "max_staleness halved",
  group_doubled: "group_size doubled", group_halved: "group_size halved",
};
const HISTOGRAMS = [["lengths", "sampled_tokens", "Sampled tokens of an episode"], ["surprises", "surprisal", "Mean of -log p of an episode, nats"]];
const LAST = 10, MOST_TASKS = 200;
const byId = (id) => document.getElementById(id);
const EVERYWHERE = "all";
const run = { name: "", end: 0, series: new Map(), step: null, chosen: new Set(), view: "charts", environment: EVERYWHERE };

// A page that was sent to somebody has all answers.
const sent = byId("given") && JSON.parse(byId("given").textContent);

async function ask(path) {
  if (sent) return sent[path];
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${await answer.text()}`);
  return answer.json();
}
const of = (name, what) => `/api/runs/${encodeURIComponent(name)}/${what}`;

function take(row) {
  const step = row.step ?? row.evaluation_step;
  if (typeof step !== "number") return;
  // A run that was resumed trains its last steps again.
  for (const [name, value] of Object.entries(row)) {
    if (typeof value !== "number" || name === "step" || name === "evaluation_step") continue;
    // Without tokens of lag 0 there is no gap, which is not a gap of 0.
    if (row.logprob_gap_tokens === 0 && (name === "logprob_gap_mean" || name === "logprob_gap_max")) continue;
    if (row.evaluation_step !== undefined && !/^reward_|\/(reward_mean|pass_at_\d+)$/.test(name)) continue;
    if (!run.series.has(name)) run.series.set(name, []);
    const points = run.series.get(name);
    while (points.length && points.at(-1)[0] >= step) points.pop();
    points.push([step, value]);
  }
}

// Returns a chart with a line for each series whose name has this ending; none for a single series, which is
// shown elsewhere.
function several(title, ending) {
  const names = [...run.series.keys()].filter((name) => name.endsWith(ending)).sort();
  return names.length > 1 ? [[title, names, ending]] : [];
}

function recent(name) {
  const points = (run.series.get(name) ?? []).slice(-LAST);
  return points.length ? points.reduce((sum, [, value]) => sum + value, 0) / points.length : null;
}
// Never -0.
const percent = (share) => `${Math.round(100 * share) || 0} %`;

function cells(table, lines) {
  table.replaceChildren(...lines.map(([name, ...others]) => {
    const line = element("tr");
    line.append(element("th", {}, name), ...others.map((text) => element("td", {}, text)));
    return line;
  }));
}

function showTimes() {
  const step = recent("step_s");
  byId("slow").hidden = recent("groups_wait_s") === null || !step;
  if (byId("slow").hidden) return;
  byId("slow-steps").textContent = `${Math.min(LAST, run.series.get("step_s").length)} steps, of ${number(step)} s each`;
  const shown = TIMES.filter(([, , name]) => recent(name));
  const lines = shown.map(([who, what, name, isShare]) => {
    const value = recent(name), share = isShare ? value : value / step;
    return [who, what, isShare ? "" : `${number(value)} s`, percent(share)];
  });
  const known = TIMES.filter(([who]) => who === "trainer").reduce((sum, [, , name]) => sum + (recent(name) ?? 0), 0);
  const place = shown.findLastIndex(([who]) => who === "trainer") + 1, rest = Math.max(0, step - known);
  lines.splice(place, 0, ["trainer", "other: batches and orders on their way", `${number(rest)} s`, percent(rest / step)]);
  const beside = BESIDE.filter(([, , name]) => recent(name) !== null).map(([who, what, name]) => [who, what, `${number(recent(name))} s`, ""]);
  cells(byId("times"), [...lines, ...beside]);
  const newest = (name) => run.series.get(name)?.at(-1)?.[1];
  const gains = Object.entries(CHANGES).map(([name, words]) => [words, newest(`gain/${name}`)]).filter(([, gain]) => gain !== undefined);
  byId("advised").hidden = gains.length === 0;
  if (!gains.length) return;
  const error = newest("prediction_error");
  byId("predicted").textContent = `Predicted: ${number(newest("predicted_steps_per_s"))} steps/s, `
    + (error === undefined ? "not checked yet" : `the last prediction was off by ${percent(error)}`)
    + `. Rollout servers wanted: ${number(newest("wanted_servers"))}.`;
  cells(byId("gains"), gains.sort((a, b) => b[1] - a[1]).map(([words, gain]) => [words, `${gain > 0 ? "+" : ""}${percent(gain)} steps/s`]));
}

function show() {
  showTimes();
  const newest = NEWEST.filter((name) => run.series.has(name));
  byId("newest").replaceChildren(...newest.map((name) => {
    const box = element("div");
    box.append(element("dt", {}, name), element("dd", {}, number(run.series.get(name).at(-1)[1])));
    return box;
  }));
  const [reward, ...others] = CHARTS;
  const shown = [reward, ...several("Reward of each environment", "/reward"), ...several("Reward of each evaluation", "/reward_mean"),
    ...others, ...[...run.chosen].map((name) => [name, [name]])];
  const plots = byId("plots");
  while (plots.children.length > shown.length) plots.lastChild.remove();
  while (plots.children.length < shown.length) plots.append(element("figure"));
  shown.forEach(([title, names, ending], place) => {
    const series = names.filter((name) => run.series.has(name))
      .map((name) => ({ name: ending ? name.slice(0, -ending.length) : name, points: run.series.get(name),
        dots: name.startsWith("reward_heldout") || ending === "/reward_mean" }));
    plots.children[place].hidden = series.length === 0;
    // A chart under the pointer is not drawn again: it is being read.
    if (!plots.children[place].matches(":hover") || !plots.children[place].firstChild) draw(plots.children[place], title, series);
  });
  const metric = byId("metric"), known = new Set([...metric.options].map((option) => option.value));
  for (const name of [...run.series.keys()].sort()) if (!known.has(name)) metric.append(element("option", { value: name }, name));
}

// A table in a table becomes one row for each of its values.
function flat([name, value]) {
  if (value === null || typeof value !== "object") return [[name, value]];
  const inner = Object.entries(value);
  return inner.length ? inner.flatMap(([key, one]) => flat([`${name} / ${key}`, one])) : [[name, "none"]];
}

function rows(table, entries) {
  cells(table, entries.flatMap(flat).map(([name, value]) => [name, number(value)]));
}

// Shows an episode: what the model sampled, and what it read in between; its branches as a tree.
function conversation(one) {
  const box = element("div", { class: "conversation" });
  const isTree = one.branches?.every((branch) => branch.turns);
  if (isTree) one.branches.forEach((branch, place) => { if (!branch.after) box.append(tree(one.branches, place)); });
  // Runs of older versions, and models without a tokenizer.json, have no turns.
  else if (!one.turns) box.append(element("pre", { class: "sampled" }, one.reply));
  // The prompt is above all replies.
  else addTurns(box, one.turns, false);
  return box;
}

// A branch stands inside the branch whose turns it begins with, behind the last of these.
function tree(branches, place) {
  const branch = branches[place], box = element("details", { class: "branch", open: "" });
  const tokens = `${number(branch.sampled_tokens)} tokens sampled`, name = branch.name ? ` ${branch.name}` : "";
  const reward = branch.reward == null ? "" : `, reward ${number(branch.reward)}`;
  box.append(element("summary", {}, `branch ${place + 1}${name}${reward}, share ${number(branch.share)}, ${tokens}`));
  addTurns(box, branch.turns, true, (turns) => branches.forEach((other, child) => {
    if (other.after?.branch === place && other.after.turns === turns) box.append(tree(branches, child));
  }));
  return box;
}

function addTurns(box, turns, hasPrompt, isShown = () => {}) {
  turns.forEach((turn, place) => {
    if (hasPrompt || place > 0) box.append(element("small", {}, `context, ${number(turn.context_tokens)} tokens`), element("pre", { class: "context" }, turn.context));
    box.append(element("small", {}, `turn ${place + 1}, ${number(turn.sampled_tokens)} tokens sampled`), element("pre", { class: "sampled" }, turn.sampled));
    isShown(place + 1);
  });
}

// Runs of older versions have neither.
function beside(one) {
  return [["advantage", one.advantage], ["lag", one.lag]].filter(([, value]) => typeof value === "number")
    .flatMap(([name, value]) => [`${name} ${number(value)}`, element("br")]);
}

async function showReplies() {
  const query = run.step === null ? "" : `?step=${run.step}`;
  const found = await ask(of(run.name, `trajectories${query}`));
  byId("step").replaceChildren(...found.steps.map((step) => element("option", { value: step }, step)));
  byId("step").value = found.step ?? "";
  const environments = [...new Set([EVERYWHERE, ...found.trajectories.map((one) => one.environment).sort(), run.environment])];
  byId("environment").replaceChildren(...environments.map((name) => element("option", { value: name }, name)));
  byId("environment").value = run.environment;
  const chosen = found.trajectories.filter((one) => [EVERYWHERE, one.environment].includes(run.environment));
  byId("kept").textContent = found.step === null ? "none was kept yet" : `${chosen.length} replies were kept`;
  const groups = new Map();
  for (const one of chosen) {
    const key = `${one.environment}, task ${one.task_index}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(one);
  }
  byId("groups").replaceChildren(...[...groups].map(([key, members], place) => {
    const mean = members.reduce((sum, one) => sum + one.reward, 0) / members.length;
    const box = element("details", place === 0 ? { open: "" } : {});
    box.append(element("summary", {}, `${key}: mean reward ${number(mean)}, ${members.length} repl${members.length === 1 ? "y" : "ies"}`));
    box.append(element("pre", { class: "context" }, members[0].prompt));
    for (const one of members) {
      const item = element("article"), side = element("div");
      const versions = one.versions.map(([count, version]) => `${count} by version ${version}`).join(", ");
      side.append(element("b", {}, `reward ${number(one.reward)}`), element("br"), ...beside(one), `${one.status}`, element("br"), `tokens: ${versions}`);
      for (const [name, value] of Object.entries(one.metrics ?? {})) side.append(element("br"), `${name}: ${number(value)}`);
      item.append(side, conversation(one));
      box.append(item);
    }
    return box;
  }));
}

const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

// Rewards by task, the hardest first, and how lengths and surprisal of the newest step spread.
async function showTasks() {
  const groups = await ask(of(run.name, "groups")), tasks = new Map();
  for (const one of groups.filter((group) => group.rewards.length)) {
    const key = `${one.environment}, task ${one.task_index}`;
    if (!tasks.has(key)) tasks.set(key, []);
    tasks.get(key).push([one.step, mean(one.rewards)]);
  }
  const lines = [...tasks].map(([key, found]) => [key, found, mean(found.map(([, reward]) => reward))]).sort((a, b) => a[2] - b[2]);
  const shown = lines.slice(0, MOST_TASKS), newest = groups.filter((group) => group.step === groups.at(-1).step);
  byId("sampled").textContent = groups.length ? `${number(tasks.size)} tasks in ${number(groups.length)} groups of sampled steps`
    + (shown.length < lines.length ? `; the ${number(shown.length)} hardest are shown` : "") : "no step was sampled yet";
  cells(byId("rewards"), [["", "groups", "mean reward", "first", "last"], ...shown.map(([key, found, all]) =>
    [key, number(found.length), number(all), `${number(found[0][1])} in step ${found[0][0]}`, `${number(found.at(-1)[1])} in step ${found.at(-1)[0]}`])]);
  for (const [id, name, title] of HISTOGRAMS)
    bars(byId(id), groups.length ? `${title}, step ${groups.at(-1).step}` : title, newest.flatMap((group) => group[name]).filter((one) => one !== null));
}

async function showAbout() {
  const { summary, log } = await ask(of(run.name, "about"));
  byId("unended").hidden = Object.keys(summary).length > 0;
  byId("ended").hidden = !byId("unended").hidden;
  rows(byId("ledger"), Object.entries(summary.ledger ?? {}));
  rows(byId("summary"), Object.entries(summary).filter(([name]) => name !== "ledger"));
  byId("log").replaceChildren(...log.map((line) => element("span", / (WARNING|ERROR) /.test(line) ? { class: "bad" } : {}, `${line}\n`)));
}

// The address names what is shown, so a reload or another reader of the address sees the same.
const remember = () => history.replaceState(null, "", `#${encodeURIComponent(run.name)}/${run.view}`);
const remembered = () => location.hash.slice(1).split("/").map(decodeURIComponent);

async function open(view) {
  run.view = view;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === view));
    byId(button.dataset.view).hidden = button.dataset.view !== view;
  }
  remember();
  if (view === "replies") await showReplies();
  if (view === "tasks") await showTasks();
  if (view === "about") await showAbout();
}

async function choose(name) {
  Object.assign(run, { name, end: 0, series: new Map(), step: null, environment: EVERYWHERE });
  remember();
  byId("plots").replaceChildren();
  await follow();
  await open(run.view);
}

async function follow() {
  for (let isAll = false; !isAll;) {
    const part = await ask(of(run.name, `metrics?from=${run.end}`));
    part.rows.forEach(take);
    isAll = part.is_all || part.end === run.end;
    run.end = part.end;
  }
  show();
}

async function tick() {
  const runs = await ask("/api/runs");
  const menu = byId("run");
  if ([...menu.options].map((option) => option.value).join("\n") !== runs.map((one) => one.name).join("\n")) {
    menu.replaceChildren(...runs.map((one) => element("option", { value: one.name }, one.name)));
    menu.value = run.name;
  }
  if (!runs.length) { byId("state").textContent = "no run has written metrics yet"; return; }
  if (!run.name) {
    const [wanted, view] = remembered();
    if (["replies", "tasks", "about"].includes(view)) run.view = view;
    menu.value = runs.some((one) => one.name === wanted) ? wanted : runs[0].name;
    await choose(menu.value);
  } else await follow();
  const line = runs.find((one) => one.name === run.name), state = byId("state");
  if (!line) return;
  const isLive = !line.state && Date.now() / 1000 - line.written_s < LIVE_S;
  const hasFailed = line.state === "failed", hasSteps = run.series.size > 0;
  state.className = isLive ? "live" : hasFailed ? "bad" : "";
  const steps = run.series.get("reward_mean")?.at(-1)?.[0];
  const at = steps === undefined ? "" : `, version ${number(steps)}`;
  state.textContent = (line.state || (isLive ? (steps === undefined ? "is starting" : "is training") : "has not written for a while")) + at;
  byId("traced").hidden = !line.has_trace;
  byId("trace").href = of(run.name, "trace");
  byId("waiting").hidden = hasSteps || Boolean(line.state);
  byId("stepless").hidden = hasSteps || !line.state;
  const notes = line.cause ? [element("li", hasFailed ? { class: "bad" } : {}, line.cause)] : [];
  for (const [name, cause] of Object.entries(line.suspended_environments ?? {}))
    notes.push(element("li", { class: "bad" }, `environment ${name} is suspended: ${cause}`));
  byId("notes").replaceChildren(...notes);
}

async function guarded(work) {
  const problem = byId("problem");
  try { await work(); problem.hidden = true; }
  catch (error) { problem.textContent = `The dashboard does not answer: ${error.message}`; problem.hidden = false; }
}

byId("run").addEventListener("change", (event) => guarded(async () => { await choose(event.target.value); await tick(); }));
byId("step").addEventListener("change", (event) => guarded(() => { run.step = Number(event.target.value); return showReplies(); }));
byId("environment").addEventListener("change", (event) => guarded(() => { run.environment = event.target.value; return showReplies(); }));
byId("metric").addEventListener("change", (event) => { if (event.target.value) run.chosen.add(event.target.value); event.target.value = ""; show(); });
for (const button of document.querySelectorAll("nav button"))
  button.addEventListener("click", () => guarded(() => open(button.dataset.view)));
(async () => { for (;;) { await guarded(tick); if (sent) return; await new Promise((done) => setTimeout(done, PERIOD_MS)); } })();
