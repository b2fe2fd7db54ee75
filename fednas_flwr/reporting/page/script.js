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
