//! Plots latencies as an SVG that any browser shows.
//!
//! Both axes are logarithmic: percentiles by their nines (99 to 99.9 is as wide as 90 to 99), and
//! time by decades. So the tail is easy to see; a linear plot hides it in the last pixel.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use hdrhistogram::Histogram;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 500.0;
/// Margins of the plot: above, right, below, left.
const MARGINS: [f64; 4] = [64.0, 110.0, 56.0, 80.0];
/// Points for each nine.
const STEPS_PER_NINE: u32 = 8;
const NINES_MAX: u32 = 6;
/// Colours that people with colour blindness can tell apart.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// The latencies of one test.
pub(super) struct Line {
    name: String,
    /// Number of nines of the percentile, and microseconds.
    points: Vec<(f64, f64)>,
}

impl Line {
    /// Builds a line from latencies in nanoseconds. It ends at the percentile beyond which there is
    /// less than one request.
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 nanoseconds and requests")]
    pub(super) fn new(name: String, latency: &Histogram<u64>) -> Self {
        let nines = (0..=NINES_MAX * STEPS_PER_NINE)
            .map(|step| f64::from(step) / f64::from(STEPS_PER_NINE));
        let seen = nines.take_while(|nines| latency.len() as f64 * 10_f64.powf(-nines) >= 1.0);
        let at = |nines: f64| latency.value_at_quantile(1.0 - 10_f64.powf(-nines)) as f64 / 1e3;
        Self { name, points: seen.map(|nines| (nines, at(nines).max(1e-3))).collect() }
    }
}

/// The file for the plot. It is opened before the benchmark, so that a path that cannot be written
/// does not cost a run. Without a plot, a new file is removed and an old one stays as it was.
pub(super) struct PlotFile {
    path: PathBuf,
    file: File,
    is_left_over: bool,
}

impl PlotFile {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let is_left_over = !path.exists();
        let file = OpenOptions::new().create(true).write(true).truncate(false).open(path)?;
        Ok(Self { path: path.to_owned(), file, is_left_over })
    }

    pub(super) fn write(mut self, svg: &str) -> io::Result<()> {
        let _ = self.file.set_len(0); // a pipe has no length
        self.is_left_over = false;
        self.file.write_all(svg.as_bytes())
    }
}

impl Drop for PlotFile {
    fn drop(&mut self) {
        if self.is_left_over {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Returns the SVG.
pub(super) fn svg(title: &str, subtitle: &str, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let nines = points().map(|point| point.0).fold(1.0, f64::max).ceil();
    let decades = points().map(|point| point.1.log10());
    let (low, high) = decades
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), at| (low.min(at), high.max(at)));
    let (low, high) = if low.is_finite() {
        (low.floor(), high.ceil().max(low.floor() + 1.0))
    } else {
        (0.0, 1.0)
    };
    let [above, right, below, left] = MARGINS;
    let (bottom, end) = (HEIGHT - below, WIDTH - right);
    let x = |at: f64| left + (end - left) * at / nines;
    let y = |decade: f64| bottom - (bottom - above) * (decade - low) / (high - low);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"26\" font-size=\"17\">{}</text>\n\
         <text x=\"{left}\" y=\"46\" fill=\"#555\">{}</text>\n",
        escaped(title),
        escaped(subtitle)
    );
    for step in 0..=round_to_u32(nines) {
        let at = x(f64::from(step));
        let _ = writeln!(
            out,
            "<path d=\"M{at:.1} {above}V{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 20.0,
            percentile(step)
        );
    }
    for step in 0..=round_to_u32(high - low) {
        let decade = low + f64::from(step);
        let at = y(decade);
        let _ = writeln!(
            out,
            "<path d=\"M{left} {at:.1}H{end}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 8.0,
            at + 4.0,
            time(decade)
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">\
         requests answered within this time</text>",
        f64::midpoint(left, end),
        HEIGHT - 12.0
    );
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let path: Vec<_> = line
            .points
            .iter()
            .map(|(nines, us)| format!("{:.1} {:.1}", x(*nines), y(us.log10())))
            .collect();
        let Some((last_nines, last_us)) = line.points.last() else { continue };
        let _ = writeln!(
            out,
            "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
             stroke-linejoin=\"round\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{}</text>",
            path.join("L"),
            x(*last_nines) + 6.0,
            y(last_us.log10()) + 4.0,
            escaped(&line.name)
        );
    }
    out + "</svg>\n"
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small and not negative"
)]
fn round_to_u32(count: f64) -> u32 {
    count.round() as u32
}

fn percentile(nines: u32) -> String {
    match nines {
        0 => "0 %".into(),
        1 => "90 %".into(),
        2 => "99 %".into(),
        _ => format!("99.{} %", "9".repeat(nines as usize - 2)),
    }
}

/// Formats a power of ten of a microsecond with its unit.
fn time(decade: f64) -> String {
    let (unit, above) = match decade {
        below if below < 0.0 => ("ns", -3.0),
        below if below < 3.0 => ("µs", 0.0),
        below if below < 6.0 => ("ms", 3.0),
        _ => ("s", 6.0),
    };
    format!("{:.0} {unit}", 10_f64.powf(decade - above))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, latencies: impl IntoIterator<Item = u64>) -> Line {
        let mut histogram = Histogram::new_with_bounds(1, 10_000_000_000, 3).expect("bounds");
        latencies.into_iter().for_each(|ns| histogram.record(ns).expect("in bounds"));
        Line::new(name.into(), &histogram)
    }

    #[test]
    fn line_ends_at_the_last_request() {
        let hundred = line("set", (1..=100).map(|number| number * 1000));
        let (nines, us) = hundred.points.last().expect("points");
        assert!((nines - 2.0).abs() < 1e-9 && (us - 99.0).abs() < 0.2, "{nines} {us}");
        assert!(line("get", []).points.is_empty());
    }

    #[test]
    fn labels_both_axes() {
        let lines = [
            line("set", (0..1000).map(|_| 50_000)),
            line("<get>", (0..1000).map(|number| number * 20_000)),
        ];
        let text = svg("a & b", "10 connections", &lines);
        for expected in
            ["a &amp; b", ">90 %<", ">99.9 %<", ">10 µs<", ">10 ms<", ">set<", ">&lt;get&gt;<"]
        {
            assert!(text.contains(expected), "no {expected} in {text}");
        }
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n") && !text.contains("NaN"));
        assert_eq!(text.matches("stroke-width").count(), 2, "one path for each line");
    }

    #[test]
    fn plots_a_test_without_requests() {
        assert!(!svg("none", "", &[line("get", [])]).contains("NaN"));
    }

    #[test]
    fn formats_decades_with_units() {
        let names: Vec<_> = [-1.0, 0.0, 2.0, 3.0, 5.0, 6.0].map(time).into();
        assert_eq!(names, ["100 ns", "1 µs", "100 µs", "1 ms", "100 ms", "1 s"]);
    }
}
