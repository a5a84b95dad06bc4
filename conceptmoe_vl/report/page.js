"use strict";
// The value of every line at the mouse, beside its name in the legend.
for (const figure of document.querySelectorAll(".chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const outputs = [...figure.querySelectorAll(".legend li")].map((item) =>
    item.appendChild(document.createElement("output")));
  const [left, right] = data.x;
  for (const svg of figure.querySelectorAll(".view > svg")) {
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * 460;
      const step = left + (x - 56) / (460 - 56 - 10) * (right - left);
      if (step < left || step > right) return;
      for (const [name, value] of [["x1", x], ["x2", x], ["y1", 10], ["y2", 214]])
        cursor.setAttribute(name, value);
      cursor.setAttribute("visibility", "visible");
      data.lines.forEach((line, index) => {
        let best = line.points[0];
        for (const point of line.points)
          if (Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
        outputs[index].textContent = `${best[1]} at ${best[0]}`;
      });
    });
    svg.addEventListener("pointerleave", () => {
      cursor.setAttribute("visibility", "hidden");
      for (const output of outputs) output.textContent = "";
    });
  }
}
