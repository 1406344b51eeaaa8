// The style sheet of the report: light and dark, system fonts, nothing loaded.
#pragma once

namespace mxflash::tools {

inline constexpr const char* kReportStyle = R"css(
:root { color-scheme: light dark;
  --bg: #f5f6f8; --card: #ffffff; --ink: #17202b; --muted: #566171; --line: #dde2e8; --grid: #e9edf1;
  --out: #1d63d8; --dq: #c2540a; --dk: #0b7d5b; --dv: #7a45c4; --scale: #4a6785; --good: #0b7a43; --bad: #b42318;
  --on-bar: #ffffff; --accent: #1d63d8; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #10151b; --card: #181f28; --ink: #e6ebf1; --muted: #9aa7b6; --line: #2c3642; --grid: #252e39;
  --out: #6ea8ff; --dq: #f0914a; --dk: #45c59b; --dv: #b794f6; --scale: #8fadcc; --good: #4cc38a; --bad: #ff8a80;
  --on-bar: #10151b; --accent: #6ea8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 56px; }
.kicker { margin: 0; color: var(--accent); font-weight: 600; font-size: 13px; letter-spacing: .04em; }
h1 { margin: 4px 0 12px; font-size: 30px; line-height: 1.2; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 19px; letter-spacing: -.005em; }
.verdict { margin: 0 0 18px; font-size: 18px; line-height: 1.5; max-width: 54em; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 28px; margin: 0 0 26px; color: var(--muted); font-size: 13.5px; }
.facts div { display: flex; gap: 8px; } .facts dt { font-weight: 600; } .facts dd { margin: 0; color: var(--ink); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 22px 24px; margin: 0 0 18px; }
.finding { margin: 0 0 14px; } .note { color: var(--muted); font-size: 13px; margin: 10px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 0 0 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-top: 4px solid var(--tone); border-radius: 10px;
  padding: 14px 18px 12px; max-width: 320px; }
.tile h2 { font-size: 15px; margin: 0; color: var(--tone); } .tile p { margin: 0; color: var(--muted); font-size: 13.5px; }
.tile .big { color: var(--ink); font-size: 30px; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile .big small { font-size: 15px; font-weight: 500; color: var(--muted); }
.tone-out { --tone: var(--out); } .tone-dq { --tone: var(--dq); } .tone-dk { --tone: var(--dk); }
.tone-dv { --tone: var(--dv); } .tone-scale { --tone: var(--scale); }
.scroll { overflow-x: auto; } .wide svg { min-width: 640px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 12px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
thead th { color: var(--muted); font-weight: 600; font-size: 13px; border-bottom-color: var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; } tbody th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
td.text, th.text { text-align: left; white-space: normal; min-width: 22em; }
code { font: .93em ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: nowrap; background: var(--grid);
  border-radius: 4px; padding: 1px 4px; }
.gain { color: var(--good); font-weight: 600; } .loss { color: var(--bad); font-weight: 600; } .same { color: var(--muted); }
.better th::before { content: "\25B2\00A0"; color: var(--good); font-size: 12px; }
.meter { display: inline-block; width: 90px; height: 8px; margin-right: 10px; border-radius: 4px; background: var(--grid);
  overflow: hidden; vertical-align: 1px; } .meter i { display: block; height: 100%; background: var(--scale); }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px 26px; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: 14px; margin: 0 0 2px; }
figcaption span { font-weight: 400; color: var(--muted); }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
svg text { fill: var(--muted); } .end { text-anchor: end; } .middle { text-anchor: middle; }
svg .axis { font-size: 11.5px; } svg .value { fill: var(--ink); font-weight: 600; } svg .inside { fill: var(--on-bar); }
svg .name { fill: var(--tone); font-weight: 650; font-size: 13px; }
.grid { stroke: var(--grid); } .base { stroke: var(--muted); } .reference { stroke: var(--ink); stroke-dasharray: 5 4; }
.bar { fill: var(--tone); } .curve { fill: none; stroke: var(--tone); stroke-width: 2; stroke-linejoin: round; }
.dot { fill: var(--tone); } .curve.tone-dq { stroke-dasharray: 7 3; }
footer { color: var(--muted); font-size: 13px; padding: 4px 2px; } footer p { margin: 0 0 6px; }
@media print { body { background: none; } section, .tile { break-inside: avoid; } }
)css";

}  // namespace mxflash::tools
