const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
function draw(place) {
  const figure = structuredClone(figures[place.dataset.figure]), width = place.clientWidth;
  const night = dark.matches && !printing;
  drawFigure(place, figure, { width, size: width < 520 ? 10 : 12,
    text: night ? "#c9d2de" : "#2a3442", rule: night ? "#313a47" : "#e3e8ee",
    ends: night ? ["#222a35", "#3d7be0"] : ["#eef2f7", "#1f55b5"] });
}
const places = [...document.querySelectorAll(".plot")];
const drawAll = () => places.forEach(draw);
let width = 0;
new ResizeObserver(() => {
  const now = document.querySelector("main").clientWidth;
  if (now !== width) { width = now; requestAnimationFrame(drawAll); }
}).observe(document.querySelector("main"));
dark.addEventListener("change", drawAll);
function print(on) {
  printing = on;
  document.body.style.width = on ? "700px" : "";
  drawAll();
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
