//! The loss curve as an SVG picture.

use std::path::Path;

use plotters::prelude::*;

use crate::error::{Error, Result};

/// Pixels.
const SIZE: (u32, u32) = (900, 540);
/// Share of the run over which the smooth line averages.
const SMOOTHING: usize = 25;

/// Draws losses by step (from 1): every one in light blue, and their running mean in dark blue.
///
/// # Errors
/// The file cannot be written.
pub fn loss_curve(path: &Path, losses: &[f64]) -> Result<()> {
    draw(path, losses).map_err(|e| Error::Plot { path: path.to_path_buf(), reason: e.to_string() })
}

fn draw(path: &Path, losses: &[f64]) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let highest = losses.iter().copied().fold(0.0, f64::max);
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("Training loss", ("sans-serif", 24))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(1f64..(losses.len().max(2) as f64), 0f64..(1.05 * highest).max(1e-3))?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("cross entropy per learned token")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 17))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let points = |values: Vec<f64>| values.into_iter().enumerate().map(|(i, value)| ((i + 1) as f64, value));
    let light = RGBColor(150, 190, 230);
    let dark = RGBColor(20, 70, 140);
    let swatch =
        |color: RGBColor, width| move |(x, y)| PathElement::new([(x, y), (x + 24, y)], color.stroke_width(width));
    let window = smoothing_window(losses.len());
    chart
        .draw_series(LineSeries::new(points(losses.to_vec()), light.stroke_width(1)))?
        .label("each step")
        .legend(swatch(light, 1));
    chart
        .draw_series(LineSeries::new(points(running_mean(losses, window)), dark.stroke_width(3)))?
        .label(format!("mean of {window} steps"))
        .legend(swatch(dark, 3));
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

fn smoothing_window(steps: usize) -> usize {
    (steps / SMOOTHING).max(1)
}

/// Mean of each value and its neighbours, `window` of them in all; near the ends of as many as there are.
fn running_mean(values: &[f64], window: usize) -> Vec<f64> {
    let mean = |slice: &[f64]| slice.iter().sum::<f64>() / slice.len() as f64;
    let around = |i: usize| i.saturating_sub(window / 2)..(i + window.div_ceil(2)).min(values.len());
    (0..values.len()).map(|i| mean(&values[around(i)])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smooth_line_averages_neighbours() {
        assert_eq!(running_mean(&[3.0, 0.0, 3.0, 6.0], 3), [1.5, 2.0, 3.0, 4.5]);
        assert_eq!(running_mean(&[4.0, 2.0, 0.0, 4.0], 2), [4.0, 3.0, 1.0, 2.0]);
        assert_eq!(running_mean(&[4.0, 2.0], 1), [4.0, 2.0]);
        assert_eq!([smoothing_window(10), smoothing_window(500)], [1, 20]);
    }

    #[test]
    fn the_picture_has_both_lines_and_labels() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        for losses in [vec![], vec![1.0], vec![2.5, 2.0, 1.0, 0.5]] {
            loss_curve(&path, &losses).unwrap();
            let svg = std::fs::read_to_string(&path).unwrap();
            for text in ["Training loss", "step", "cross entropy per learned token", "each step", "mean of 1 steps"] {
                assert!(svg.contains(text), "no {text:?} for {} losses", losses.len());
            }
            if losses.len() == 4 {
                assert!(svg.matches("<polyline").count() >= 2, "{svg}");
            }
        }
        assert!(loss_curve(&dir.path().join("absent/loss.svg"), &[1.0]).is_err());
    }
}
