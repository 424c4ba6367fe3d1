//! The loss curve as an SVG picture.

use std::ops::Range;
use std::path::Path;

use plotters::prelude::*;

use crate::error::{Error, Result};
use crate::report::History;

/// Pixels.
const SIZE: (u32, u32) = (900, 540);
/// Share of the run over which the smooth line averages.
const SMOOTHING: usize = 25;
/// Losses of single steps that are drawn at most, two to a pixel.
const MOST_POINTS: usize = 2 * SIZE.0 as usize;

const LIGHT: RGBColor = RGBColor(150, 190, 230);
const DARK: RGBColor = RGBColor(20, 70, 140);
const VALIDATION: RGBColor = RGBColor(215, 95, 20);

/// A step and a loss.
type Point = (f64, f64);

/// Draws the losses of a run by step: every one in light blue, their running mean in dark blue, validations in orange.
/// Losses that are not finite are left out.
///
/// # Errors
/// The file cannot be written.
pub fn loss_curve(path: &Path, title: &str, history: &History) -> Result<()> {
    draw(path, title, history).map_err(|e| Error::Plot { path: path.to_path_buf(), reason: e.to_string() })
}

fn draw(path: &Path, title: &str, history: &History) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let finite = |points: Vec<Point>| points.into_iter().filter(|(_, loss)| loss.is_finite()).collect::<Vec<_>>();
    let training = finite(history.steps.iter().map(|report| (report.step as f64, report.loss)).collect());
    let validation = finite(history.validations.iter().map(|report| (report.step as f64, report.val_loss)).collect());
    let all = || training.iter().chain(&validation).copied();

    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 24))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(steps(all().map(|point| point.0)), losses(all().map(|point| point.1)))?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("cross entropy per learned token")
        .x_label_formatter(&|step| if step.fract() == 0.0 { format!("{step:.0}") } else { String::new() })
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 17))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let window = smoothing_window(training.len());
    let mut lines = Vec::new();
    if window > 1 {
        lines.push((thin(&training, MOST_POINTS), "each step".to_string(), LIGHT, 1));
    }
    if !training.is_empty() {
        let label = if window > 1 { format!("mean of {window} steps") } else { "each step".to_string() };
        lines.push((every(running_mean(&training, window), MOST_POINTS), label, DARK, 3));
    }
    if let Some(best) = history.best_validation() {
        let label = format!("validation, best {:.4} after step {}", best.val_loss, best.step);
        lines.push((validation.clone(), label, VALIDATION, 2));
    }
    for (points, label, color, width) in lines {
        let swatch = move |(x, y)| PathElement::new([(x, y), (x + 24, y)], color.stroke_width(width));
        // A line of one point is not seen.
        let dots = points.iter().filter(|_| points.len() == 1 || color == VALIDATION);
        chart.draw_series(dots.map(|&point| Circle::new(point, 4, color.filled())))?;
        chart.draw_series(LineSeries::new(points, color.stroke_width(width)))?.label(label).legend(swatch);
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE)
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 15))
        .draw()?;
    area.present()?;
    Ok(())
}

/// From the first step to the last; with room around a single one.
fn steps(steps: impl Iterator<Item = f64>) -> Range<f64> {
    match hull(steps) {
        None => 0.0..1.0,
        Some((first, last)) if first == last => first - 1.0..last + 1.0,
        Some((first, last)) => first..last,
    }
}

/// With some room; from 0 unless that hides how losses differ.
fn losses(losses: impl Iterator<Item = f64>) -> Range<f64> {
    let Some((low, high)) = hull(losses) else { return 0.0..1.0 };
    let room = (0.05 * (high - low)).max(1e-3 * high.abs()).max(1e-6);
    let from_zero = 0.0 <= low && low < 0.5 * high;
    (if from_zero { 0.0 } else { low - room })..high + room
}

fn hull(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |hull, value| {
        let (low, high) = hull.unwrap_or((value, value));
        Some((value.min(low), value.max(high)))
    })
}

fn smoothing_window(steps: usize) -> usize {
    (steps / SMOOTHING) | 1
}

/// Mean of each loss and its neighbours, `window` (odd) of them in all. At the start of as many before as after, so that a
/// steep beginning is kept; at the end of as many as there are.
fn running_mean(points: &[Point], window: usize) -> Vec<Point> {
    let mut sums = vec![0.0];
    sums.extend(points.iter().scan(0.0, |sum, point| {
        *sum += point.1;
        Some(*sum)
    }));
    let mean = |i: usize| {
        let before = (window / 2).min(i);
        let (from, to) = (i - before, (i + before + 1).min(points.len()));
        (sums[to] - sums[from]) / (to - from) as f64
    };
    points.iter().enumerate().map(|(i, point)| (point.0, mean(i))).collect()
}

/// At most `most` points: the lowest and the highest of each stretch, so that the line fills the same room.
fn thin(points: &[Point], most: usize) -> Vec<Point> {
    if points.len() <= most {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(most / 2);
    let ends = |points: &[Point]| {
        let lowest = points.iter().min_by(|a, b| a.1.total_cmp(&b.1)).copied();
        let highest = points.iter().max_by(|a, b| a.1.total_cmp(&b.1)).copied();
        let mut ends: Vec<Point> = lowest.into_iter().chain(highest).collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends
    };
    points.chunks(stretch).flat_map(ends).collect()
}

/// About `most` points of a smooth line, the last one among them.
fn every(points: Vec<Point>, most: usize) -> Vec<Point> {
    let stretch = points.len().div_ceil(most).max(1);
    points.into_iter().rev().step_by(stretch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{step_report, validation_report};

    fn by_step(losses: &[f64]) -> Vec<Point> {
        losses.iter().enumerate().map(|(i, &loss)| ((i + 1) as f64, loss)).collect()
    }

    fn svg(losses: &[f64], validations: &[(usize, f64)]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        let history = History {
            steps: losses.iter().enumerate().map(|(i, &loss)| step_report(i + 1, loss)).collect(),
            validations: validations.iter().map(|&(step, loss)| validation_report(step, loss)).collect(),
        };
        loss_curve(&path, "Loss of <one> & all", &history).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.contains("Loss of &lt;one&gt; &amp; all"), "the title is escaped");
        for text in ["step", "cross entropy per learned token"] {
            assert!(svg.contains(text), "no {text:?} for {} losses", losses.len());
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        svg
    }

    #[test]
    fn the_smooth_line_averages_neighbours() {
        let mean = |losses: &[f64], window| {
            let smooth = running_mean(&by_step(losses), window);
            assert!(smooth.iter().map(|point| point.0).eq((1..=losses.len()).map(|step| step as f64)));
            smooth.into_iter().map(|point| point.1).collect::<Vec<_>>()
        };
        assert_eq!(mean(&[3.0, 0.0, 3.0, 6.0], 3), [3.0, 2.0, 3.0, 4.5]);
        assert_eq!(mean(&[8.0, 4.0, 3.0, 1.0, 4.0, 4.0], 5), [8.0, 5.0, 4.0, 3.2, 3.0, 3.0]);
        assert_eq!(mean(&[4.0, 2.0], 1), [4.0, 2.0]);
        assert!(mean(&[], 1).is_empty());
        assert_eq!([0, 10, 49, 50, 500].map(smoothing_window), [1, 1, 1, 3, 21]);
    }

    #[test]
    fn thinning_keeps_the_extremes_in_order() {
        let points = by_step(&[5.0, 1.0, 9.0, 4.0, 3.0, 2.0, 7.0]);
        assert_eq!(thin(&points, 7), points);
        assert_eq!(thin(&points, 4), [(2.0, 1.0), (3.0, 9.0), (6.0, 2.0), (7.0, 7.0)]);
        assert_eq!(every(points, 3), [(7.0, 7.0), (4.0, 4.0), (1.0, 5.0)]);
        assert_eq!(every(by_step(&[2.0, 1.0]), 3), [(2.0, 1.0), (1.0, 2.0)]);
        assert!(every(Vec::new(), 3).is_empty());
    }

    #[test]
    fn axes_hold_everything_and_show_differences() {
        let range = |values: &[f64]| losses(values.iter().copied());
        assert_eq!(range(&[]), 0.0..1.0);
        assert_eq!(range(&[10.0, 1.0]), 0.0..10.45);
        assert_eq!(range(&[2.0, 1.0]), 0.95..2.05);
        assert_eq!(range(&[0.0, 0.0]), -1e-6..1e-6);
        let one = range(&[3.0]);
        assert!(one.start < 3.0 && 3.0 < one.end && one.end - one.start < 0.1, "{one:?}");
        assert_eq!(steps([].into_iter()), 0.0..1.0);
        assert_eq!(steps([7.0].into_iter()), 6.0..8.0);
        assert_eq!(steps([3.0, 9.0].into_iter()), 3.0..9.0);
    }

    #[test]
    fn the_picture_shows_what_there_is() {
        let nothing = svg(&[], &[]);
        assert!(!nothing.contains("each step") && !nothing.contains("validation"), "{nothing}");
        let one = svg(&[1.0], &[]);
        assert!(one.contains("<circle") && one.contains("each step") && !one.contains("mean of"), "{one}");
        let few = svg(&[2.5, f64::NAN, f64::INFINITY, 0.5], &[(0, 3.0), (2, f64::NAN), (4, 1.25)]);
        assert_eq!(few.matches("<circle").count(), 2);
        assert!(few.contains("validation, best 1.2500 after step 4"), "{few}");
        let long: Vec<f64> = (0..20_000).map(|i| 2.0 + (i as f64).sin()).collect();
        let many = svg(&long, &[]);
        assert!(many.contains("each step") && many.contains("mean of 801 steps"));
        assert!(many.len() < 100_000, "{} bytes", many.len());
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let told = loss_curve(&dir.path().join("absent/loss.svg"), "", &History::default()).unwrap_err().to_string();
        assert!(told.starts_with("cannot draw ") && told.contains("absent/loss.svg: "), "{told}");
    }
}
