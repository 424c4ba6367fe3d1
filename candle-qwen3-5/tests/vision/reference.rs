//! The tower written once more with plain loops over f64, from the definition; nothing of it is meant to be fast.

use std::collections::BTreeMap;
use std::f64::consts::PI;

use candle_cp_layers::Activation;
use candle_qwen3_5::vision::VisionShape;

pub type Rows = Vec<Vec<f64>>;

/// The tower's tensors by name, row-major.
pub type Tensors = BTreeMap<String, Vec<f64>>;

/// Soft tokens of the images with these grids (frames, rows, columns of patches).
pub fn features(shape: &VisionShape, tensors: &Tensors, pixels: &Rows, grids: &[[usize; 3]]) -> Rows {
    let mut features = Rows::new();
    let mut start = 0;
    for &[frames, height, width] in grids {
        for _ in 0..frames {
            // Frames know nothing of each other.
            let of_frame = &pixels[start..start + height * width];
            features.extend(frame(shape, tensors, of_frame, height, width));
            start += height * width;
        }
    }
    assert_eq!(start, pixels.len());
    features
}

fn frame(shape: &VisionShape, tensors: &Tensors, pixels: &[Vec<f64>], height: usize, width: usize) -> Rows {
    let places: Vec<(usize, usize)> = (0..height * width).map(|patch| place(patch, width, shape)).collect();
    let mut x = affine(tensors, "model.visual.patch_embed.proj", pixels);
    for (row, &(y, x_at)) in x.iter_mut().zip(&places) {
        add(row, &position(shape, tensors, [y, x_at], [height, width]));
    }
    for block in 0..shape.depth {
        let name = |part: &str| format!("model.visual.blocks.{block}.{part}");
        let qkv = affine(tensors, &name("attn.qkv"), &normed(tensors, &name("norm1"), &x));
        let attended = affine(tensors, &name("attn.proj"), &attend(shape, &qkv, &places));
        x.iter_mut().zip(&attended).for_each(|(x, y)| add(x, y));
        let mut middle = affine(tensors, &name("mlp.linear_fc1"), &normed(tensors, &name("norm2"), &x));
        middle.iter_mut().flatten().for_each(|y| *y = activation(shape.activation, *y));
        let out = affine(tensors, &name("mlp.linear_fc2"), &middle);
        x.iter_mut().zip(&out).for_each(|(x, y)| add(x, y));
    }
    let normed = normed(tensors, "model.visual.merger.norm", &x);
    let merged: Rows = normed.chunks(shape.spatial_merge_size.pow(2)).map(|patches| patches.concat()).collect();
    let mut middle = affine(tensors, "model.visual.merger.linear_fc1", &merged);
    middle.iter_mut().flatten().for_each(|y| *y = activation(Activation::Gelu, *y));
    affine(tensors, "model.visual.merger.linear_fc2", &middle)
}

/// Row and column of a patch, taken apart from its number.
fn place(patch: usize, width: usize, shape: &VisionShape) -> (usize, usize) {
    let merge = shape.spatial_merge_size;
    let (square, inside) = (patch / (merge * merge), patch % (merge * merge));
    let squares_wide = width / merge;
    (square / squares_wide * merge + inside / merge, square % squares_wide * merge + inside % merge)
}

/// Every entry of the learned grid, weighted by how near it is: less than one step away, or nothing.
fn position(shape: &VisionShape, tensors: &Tensors, place: [usize; 2], size: [usize; 2]) -> Vec<f64> {
    let side = (1..).take_while(|side| side * side <= shape.num_position_embeddings).last().unwrap();
    let at = |axis: usize| match size[axis] {
        1 => 0.0,
        size => place[axis] as f64 / (size - 1) as f64 * (side - 1) as f64,
    };
    let hat = |distance: f64| (1.0 - distance.abs()).max(0.0);
    let table = &tensors["model.visual.pos_embed.weight"];
    let mut sum = vec![0.0; shape.hidden_size];
    for row in 0..side {
        for column in 0..side {
            let weight = hat(at(0) - row as f64) * hat(at(1) - column as f64);
            let entry = &table[(row * side + column) * shape.hidden_size..][..shape.hidden_size];
            sum.iter_mut().zip(entry).for_each(|(sum, entry)| *sum += weight * entry);
        }
    }
    sum
}

fn attend(shape: &VisionShape, qkv: &Rows, places: &[(usize, usize)]) -> Rows {
    let (hidden, heads) = (shape.hidden_size, shape.num_heads);
    let size = hidden / heads;
    let head = |patch: usize, part: usize, head: usize| &qkv[patch][part * hidden + head * size..][..size];
    let mut out = vec![vec![0.0; hidden]; qkv.len()];
    for h in 0..heads {
        let turned = |patch: usize, part: usize| turn(shape, head(patch, part, h), places[patch]);
        let keys: Rows = (0..qkv.len()).map(|patch| turned(patch, 1)).collect();
        for (patch, out) in out.iter_mut().enumerate() {
            let query = turned(patch, 0);
            let scores: Vec<f64> = keys.iter().map(|key| (dot(&query, key) / (size as f64).sqrt()).exp()).collect();
            let total: f64 = scores.iter().sum();
            for (key, score) in scores.iter().enumerate() {
                let value = head(key, 2, h).iter();
                out[h * size..][..size].iter_mut().zip(value).for_each(|(out, value)| *out += score / total * value);
            }
        }
    }
    out
}

/// Dimension `i` turns with `i + size / 2`: the first half of the pairs by the row, the others by the column.
fn turn(shape: &VisionShape, x: &[f64], (row, column): (usize, usize)) -> Vec<f64> {
    let pairs = x.len() / 2;
    let of_axis = pairs / 2;
    let mut y = x.to_vec();
    for pair in 0..pairs {
        let (place, index) = if pair < of_axis { (row, pair) } else { (column, pair - of_axis) };
        let angle = place as f64 / shape.rope_theta.powf(index as f64 / of_axis as f64);
        y[pair] = x[pair] * angle.cos() - x[pair + pairs] * angle.sin();
        y[pair + pairs] = x[pair + pairs] * angle.cos() + x[pair] * angle.sin();
    }
    y
}

/// `W x + b`.
fn affine(tensors: &Tensors, name: &str, x: &[Vec<f64>]) -> Rows {
    let (weight, bias) = (&tensors[&format!("{name}.weight")], &tensors[&format!("{name}.bias")]);
    let inputs = weight.len() / bias.len();
    let outputs = |x: &Vec<f64>| weight.chunks(inputs).zip(bias).map(|(row, bias)| dot(row, x) + bias).collect();
    x.iter().map(outputs).collect()
}

fn normed(tensors: &Tensors, name: &str, x: &Rows) -> Rows {
    let (weight, bias) = (&tensors[&format!("{name}.weight")], &tensors[&format!("{name}.bias")]);
    let one = |x: &Vec<f64>| {
        let count = x.len() as f64;
        let mean = x.iter().sum::<f64>() / count;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
        let rms = (variance + 1e-6).sqrt();
        x.iter().zip(weight.iter().zip(bias)).map(|(x, (weight, bias))| (x - mean) / rms * weight + bias).collect()
    };
    x.iter().map(one).collect()
}

fn activation(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Gelu => x * normal(x),
        Activation::GeluTanh => 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
    }
}

/// The normal distribution function, by its series.
fn normal(x: f64) -> f64 {
    let (mut term, mut sum) = (x, 0.0);
    for n in (3..).step_by(2) {
        sum += term;
        term *= x * x / n as f64;
        if term.abs() < 1e-18 {
            break;
        }
    }
    0.5 + sum * (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
