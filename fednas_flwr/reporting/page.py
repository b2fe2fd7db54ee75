"""The report's page as text: style, script and jinja2 template.

Python text and not files of their own, because a Flower bundle drops ``.html`` and ``.j2``. The
template is rendered with autoescape; only the style, the script, plotly.js, the figures' JSON and
the cells' SVG are put in as they are, and none of them holds text that a client wrote.
"""

STYLE = """
:root { color-scheme: light dark; --page: #f4f6f9; --card: #ffffff; --text: #1b2430;
  --soft: #5c6878; --rule: #dde3ea; --accent: #2563c9; --good: #1b7a46; --bad: #b3261e;
  --warn: #8a5a00;
  --cell-line: #9aa3af; --cell-node: #e6ebf2; --cell-edge: #5b6675; --cell-text: #1f2733; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --text: #e4e9f0;
  --soft: #9aa7b7; --rule: #313a47; --accent: #7fb0ff; --good: #66c792; --bad: #ff8f86;
  --warn: #e5b567; --cell-line: #76818f; --cell-node: #2b3440; --cell-edge: #8a96a5;
  --cell-text: #e4e9f0; } }
@media print { :root { color-scheme: light; --page: #fff; --card: #fff; --text: #000; --soft: #444;
  --rule: #ccc; --cell-line: #888; --cell-node: #eee; --cell-edge: #555; --cell-text: #000; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 12px; }
h3 { font-size: .95rem; margin: 0 0 4px; font-weight: 600; }
p { margin: 0 0 10px; }
header p { margin-bottom: 16px; }
.soft { color: var(--soft); }
.badge { display: inline-block; padding: 1px 10px; border-radius: 99px; border: 1px solid;
  font-size: .85rem; font-weight: 600; }
.completed { color: var(--good); } .failed { color: var(--bad); }
.unfinished { color: var(--warn); }
nav { margin: 12px 0 18px; display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .9rem; }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 18px 20px; margin-bottom: 18px; scroll-margin-top: 12px; }
.alert { border-color: var(--bad); border-left-width: 5px; overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-bottom: 18px; }
.tile { flex: 1 1 calc(25% - 12px); background: var(--card); border: 1px solid var(--rule);
  border-radius: 12px; padding: 12px 16px; }
.tile b { display: block; font-size: 1.55rem; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.tile span { display: block; font-size: .82rem; color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 2px 28px;
  margin: 0; }
.facts div { display: flex; gap: 12px; border-bottom: 1px solid var(--rule); padding: 4px 0; }
.facts dt { color: var(--soft); flex: 0 0 104px; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 18px 24px; }
.plot { width: 100%; min-height: 120px; }
.cells { display: flex; flex-wrap: wrap; gap: 18px 32px; }
.cells figure { margin: 0; max-width: 100%; }
.cells.pairs figure { max-width: calc(50% - 16px); }
.wide { overflow-x: auto; }
svg.cell { max-width: 100%; height: auto; display: block; }
.box { overflow: auto; max-height: 380px; border: 1px solid var(--rule); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th { position: sticky; top: 0; background: var(--card); font-weight: 600; white-space: nowrap; }
.num { text-align: right; white-space: nowrap; }
.wrapped th { white-space: normal; vertical-align: bottom; min-width: 72px; }
.reason { overflow-wrap: anywhere; min-width: 200px; }
.bar { height: 10px; border-radius: 5px; background: var(--accent); min-width: 2px;
  margin-top: 6px; }
pre { overflow-x: auto; font-size: .82rem; margin: 8px 0 0; }
summary { cursor: pointer; color: var(--accent); }
details { margin-top: 10px; }
.slider { display: flex; align-items: center; gap: 12px; margin-bottom: 10px; flex-wrap: wrap; }
.slider input { flex: 1 1 200px; max-width: 480px; accent-color: var(--accent); }
ul { margin: 0; padding-left: 20px; } li { overflow-wrap: anywhere; }
@media screen and (max-width: 760px) { main { padding: 16px 10px 40px; }
  section { padding: 14px 12px; }
  .grid { grid-template-columns: minmax(0, 1fr); } .tiles { gap: 8px; }
  .tile { flex-basis: calc(50% - 8px); padding: 10px 12px; } .tile b { font-size: 1.3rem; }
  svg.cell { min-width: 640px; } .pairs svg.cell { min-width: 460px; }
  .cells.pairs figure { max-width: 100%; } th, td { padding: 4px 6px; } }
@media print { main { padding: 0; } nav, .slider, .noprint { display: none; }
  .box { max-height: none; overflow: visible; }
  section, .tile { break-inside: avoid; border-color: #ccc; }
  .plot, figure, tr { break-inside: avoid; } .cells.pairs figure { max-width: 100%; }
  section.long { break-inside: auto; } th { position: static; } }
"""

SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const alphas = JSON.parse(document.getElementById("alphas-data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
function draw(place) {
  const figure = structuredClone(figures[place.dataset.figure]), layout = figure.layout;
  const night = dark.matches && !printing, narrow = place.clientWidth < 520;
  const text = night ? "#c9d2de" : "#2a3442", rule = night ? "#313a47" : "#e3e8ee";
  Object.assign(layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    width: place.clientWidth,
    font: { family: "system-ui, sans-serif", size: narrow ? 10 : 12, color: text },
    hoverlabel: { bgcolor: night ? "#2b3440" : "#ffffff", font: { color: text } } });
  for (const axis of ["xaxis", "yaxis"])
    Object.assign(layout[axis], { gridcolor: rule, linecolor: rule, zeroline: false });
  if (layout.coloraxis) {
    const ends = night ? ["#222a35", "#3d7be0"] : ["#eef2f7", "#1f55b5"];
    layout.coloraxis.colorscale = [[0, ends[0]], [1, ends[1]]];
    layout.coloraxis.showscale = !narrow;
  }
  for (const trace of figure.data)
    if (trace.text && trace.x.length * 48 < place.clientWidth - 120) trace.texttemplate = "%{text}";
  const kind = place.dataset.kind;
  if (kind) figure.data[0].z = alphas.kinds[kind][step()];
  Plotly.react(place, figure.data, layout, { displayModeBar: false });
}
const slider = document.getElementById("round");
const step = () => Number(slider.value);
const places = [...document.querySelectorAll(".plot")];
const drawAll = () => places.forEach(draw);
if (slider) slider.addEventListener("input", () => {
  document.getElementById("round-number").textContent = alphas.rounds[step()];
  slider.setAttribute("aria-valuetext", "round " + alphas.rounds[step()]);
  places.filter((place) => place.dataset.kind).forEach(draw);
});
let width = 0;
new ResizeObserver(() => {
  const now = document.querySelector("main").clientWidth;
  if (now !== width) { width = now; drawAll(); }
}).observe(document.querySelector("main"));
dark.addEventListener("change", drawAll);
function print(on) {
  printing = on;
  document.body.style.width = on ? "700px" : "";
  drawAll();
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
"""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>{{ style }}</style>
</head>
<body>
{%- macro plot(name, label, kind="") %}
<div class="plot" role="img" aria-label="{{ label }}" data-figure="{{ name }}"
  {%- if kind %} data-kind="{{ kind }}"{% endif %}></div>
{%- endmacro %}
<main>
<header>
<h1>{{ title }}</h1>
<p><span class="badge {{ run.status }}">{{ run.status }}</span>
<span class="soft">{{ started }}{% if attempts > 1 %} · resumed {{ attempts - 1 }}
{{- " time" if attempts == 2 else " times" }}{% endif %}</span></p>
</header>
{% if run.reason %}<section class="alert" role="alert"><h2>Why the run failed</h2>
<p>{{ run.reason }}</p></section>{% endif %}
{% if privacy and privacy.warning %}<section class="alert" role="alert"><h2>No privacy</h2>
<p>{{ privacy.warning }}</p></section>{% endif %}
<div class="tiles">
{% for tile in tiles %}<div class="tile"><span>{{ tile.label }}</span><b>{{ tile.value }}</b>
<span>{{ tile.note }}</span></div>
{% endfor %}</div>
<nav aria-label="Sections">
{% for id, name in sections %}<a href="#{{ id }}">{{ name }}</a>{% endfor %}</nav>
<section id="run"><h2>What was run</h2>
<dl class="facts">{% for name, value in facts %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% if config_text %}<details class="noprint"><summary>Resolved configuration</summary>
<pre tabindex="0">{{ config_text }}</pre></details>{% endif %}</section>
{% for stage in stages %}<section id="{{ stage.name }}"><h2>{{ stage.title }}</h2>
{% if stage.noised %}<p class="soft">{{ stage.noised }}</p>{% endif %}
<div class="grid">{% for name, label in stage.plots %}<div><h3>{{ label }}</h3>
{{- plot(name, label ~ " over the rounds of the " ~ stage.name ~ " stage") }}</div>
{% endfor %}</div>
{% if stage.phases[1] %}<h3 style="margin-top:12px">Configurations chosen</h3>
<div class="box" tabindex="0" role="region" aria-label="Configurations chosen in {{ stage.name }}">
<table class="wrapped"><thead><tr>{% for title in stage.phases[0] %}<th class="num">{{ title }}</th>
{%- endfor %}</tr></thead><tbody>
{% for row in stage.phases[1] %}<tr>{% for value in row %}<td class="num">{{ value }}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
<details class="noprint"><summary>All rounds as a table</summary><div class="box" tabindex="0"
role="region" aria-label="Rounds of {{ stage.name }}"><table><thead><tr><th class="num">round</th>
{%- for name in stage.metrics %}<th class="num">{{ name.replace("_", " ") }}</th>{% endfor -%}
<th class="num">seconds</th></tr></thead><tbody>
{% for row in stage.rows %}<tr>
{%- for value in row %}<td class="num">{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></details></section>
{% endfor %}
{% if groups %}<section id="groups"><h2>Groups of clients</h2>
<p>Each group has a run folder of its own, with its network and report.</p>
<div class="box" tabindex="0" role="region" aria-label="Groups of clients"><table class="wrapped">
<thead><tr><th>group</th>{% for title in group_head %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>{% for name, link, values in groups %}<tr><td><a href="{{ link }}">{{ name }}</a></td>
{%- for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></section>{% endif %}
{% if cells %}<section id="cells"><h2>Cells that were found</h2>
<div class="cells{{ " pairs" if narrow_cells }}">
{% for kind, picture in cells %}<figure><h3>{{ kind }}</h3>
<div class="wide" tabindex="0" role="region" aria-label="{{ kind }} cell, picture">
{{- picture }}</div></figure>
{% endfor %}</div></section>{% endif %}
{% if alphas.kinds %}<section id="alphas"><h2>Architecture parameters</h2>
<p class="soft">The share of every operation on every edge: softmax of the alphas.
{% if cells %}Rings mark what the derived cells keep.{% endif %}</p>
<div class="slider"><label for="round">Round <output id="round-number" for="round">
{{- alphas.rounds[-1] }}</output></label><input type="range" id="round" min="0"
max="{{ alphas.rounds | length - 1 }}" value="{{ alphas.rounds | length - 1 }}"
aria-valuetext="round {{ alphas.rounds[-1] }}"
{%- if alphas.rounds | length == 1 %} disabled{% endif %}></div>
<div class="grid">{% for kind in alphas.kinds %}<div><h3>{{ kind }}</h3>
{{- plot("alphas_" ~ kind, "Share of each operation on each edge, " ~ kind ~ " cell", kind) }}</div>
{% endfor %}</div></section>{% endif %}
{% if splits or "partition" in figures %}<section id="partition" class="long">
<h2>Who holds what</h2>
<p>{{ partition_text }}</p>
{% if "partition" in figures %}{{ plot("partition", "Records per class and client") }}{% endif %}
{% if splits %}<div class="box" tabindex="0" role="region" aria-label="Records per client"><table>
<thead><tr><th class="num">client</th><th class="num">train</th><th class="num">validation</th>
<th class="num">test</th><th class="num">all</th></tr></thead><tbody>
{% for row in splits %}<tr>{% for value in row %}<td class="num">{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}</section>{% endif %}
{% if privacy %}<section id="privacy" class="long"><h2>Privacy</h2>
{% if privacy.warning %}<p class="failed"><b>{{ privacy.warning }}</b> What follows would hold if
all noise were secret.</p>{% endif %}
{% if privacy.summary %}<p><b>(epsilon, delta) = {{ privacy.summary }}</b>, the largest of all
clients.</p>{% else %}<p>No client has accepted a schedule of this run yet: no epsilon is known.</p>
{% endif %}
{% for text in privacy.texts %}<p>{{ text }}</p>{% endfor %}
{% for name, words, head, rows in privacy.tables %}<h3 style="margin-top:12px">{{ name }}</h3>
<div class="box" tabindex="0" role="region" aria-label="{{ name }}"><table class="wrapped"><thead>
<tr>{% for title in head %}<th{% if loop.index > words %} class="num"{% endif %}>{{ title }}</th>
{%- endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for value in row %}
<td{% if loop.index > words %} class="num"{% endif %}>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endfor %}</section>{% endif %}
{% if "clients" in figures %}<section id="accuracy"><h2>Test accuracy per client</h2>
<p>{{ accuracy_text }}</p>
{{ plot("clients", "Test accuracy per client") }}</section>{% endif %}
{% if times or "traffic_search" in figures or "traffic_retrain" in figures %}
<section id="cost"><h2>Time and traffic</h2><div class="grid">
{% if times %}<div><h3>Time per stage</h3><table><tbody>
{% for name, text, share in times %}<tr><td>{{ name }}</td><td class="num">{{ text }}</td>
<td style="width:50%"><div class="bar" style="width:{{ share }}%"></div></td></tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if traffic_rows %}<div><h3>Bytes in all rounds</h3><table><thead><tr><th>stage</th>
<th class="num">sent by the server</th><th class="num">received</th></tr></thead><tbody>
{% for row in traffic_rows %}<tr><td>{{ row[0] }}</td><td class="num">{{ row[1] }}</td>
<td class="num">{{ row[2] }}</td></tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if exploration_rows %}<div><h3>Exploring against training</h3><table><thead><tr><th>stage</th>
<th class="num">time</th><th class="num">of the stage</th><th class="num">sent</th>
<th class="num">received</th></tr></thead><tbody>
{% for row in exploration_rows %}<tr><td>{{ row[0] }}</td>{% for value in row[1:] %}
<td class="num">{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% for name in ("search", "retrain") if "traffic_" ~ name in figures %}<div>
<h3>Per round, {{ name }}</h3>
{{- plot("traffic_" ~ name, "Megabytes per round of " ~ name) }}</div>
{% endfor %}</div></section>{% endif %}
{% if exported %}<section id="model"><h2>Model</h2><p>{{ exported }}</p></section>{% endif %}
<section id="failures" class="long"><h2>Failures and warnings</h2>
{% if not failures and not warnings %}<p>None: every client answered in every round.</p>{% endif %}
{% if failures %}<p>{{ failure_text }}</p><div class="box" tabindex="0" role="region"
aria-label="Failures of clients"><table><thead><tr><th class="num">client</th><th>stage</th>
<th class="num">round</th><th>verb</th><th>reason</th></tr></thead><tbody>
{% for client, stage, round, verb, reason in failures %}<tr><td class="num">{{ client }}</td>
<td>{{ stage }}</td><td class="num">{{ round }}</td><td>{{ verb }}</td>
<td class="reason">{{ reason }}</td></tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if warnings %}<h3 style="margin-top:12px">Warnings</h3><ul>
{% for text, times in warnings %}<li>{{ text }}
{%- if times > 1 %} <span class="soft">({{ times }} times)</span>{% endif %}</li>
{% endfor %}</ul>{% endif %}</section>
</main>
<noscript><p style="text-align:center">The curves and heat maps need JavaScript; all numbers are in
events.jsonl.</p></noscript>
<script type="application/json" id="figures">{{ figures_json }}</script>
<script type="application/json" id="alphas-data">{{ alphas_json }}</script>
<script>{{ plotly }}</script>
<script>{{ script }}</script>
</body>
</html>
"""
