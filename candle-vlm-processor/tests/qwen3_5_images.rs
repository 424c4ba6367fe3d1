//! Qwen 3.5's image processor against transformers.

mod support;

use candle_vlm_processor::{Error, ImageSettings, Picture, PictureFault, PictureLimits, Qwen3_5ImageSettings, Result};
use serde_json::{Value, json};
use support::{Tensors, data, fixture};

/// The settings of the released models.
const RELEASED: Qwen3_5ImageSettings = Qwen3_5ImageSettings {
    patch_size: 16,
    temporal_patch_size: 2,
    merge_size: 2,
    min_pixels: 65_536,
    max_pixels: 16_777_216,
    rescale_factor: 1.0 / 255.0,
    normalize: Some(([0.5; 3], [0.5; 3])),
};

/// What transformers takes where a file says nothing.
const ABSENT: Qwen3_5ImageSettings = Qwen3_5ImageSettings {
    patch_size: 14,
    min_pixels: 3136,
    max_pixels: 1_003_520,
    normalize: Some(([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.261_302_6, 0.275_777_1])),
    ..RELEASED
};

fn tiny() -> Qwen3_5ImageSettings {
    Qwen3_5ImageSettings::from_folder(&fixture("qwen3_5-dense/checkpoint")).unwrap()
}

fn load(name: &str) -> Picture {
    let content = std::fs::read(fixture("imaging").join(name)).unwrap();
    Picture::decode(&content, &PictureLimits::default()).unwrap()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn for_factor(factor: usize, min_pixels: usize, max_pixels: usize) -> Qwen3_5ImageSettings {
    Qwen3_5ImageSettings { patch_size: factor / 2, min_pixels, max_pixels, ..RELEASED }
}

#[test]
fn sizes_equal_those_of_transformers() {
    let sizes = support::json(&fixture("imaging/sizes.json"));
    let sizes = sizes["qwen3_5"].as_array().unwrap();
    assert!(sizes.len() >= 27);
    for case in sizes {
        let [factor, least, most] = ["factor", "min_pixels", "max_pixels"].map(|key| number(&case[key]));
        let resized = for_factor(factor, least, most).resized(number(&case["height"]), number(&case["width"])).unwrap();
        assert_eq!(json!(resized), case["resized"], "{case}");
    }
}

#[test]
fn sizes_of_many_shapes_equal_those_of_transformers() {
    let goldens = Tensors::open(&data("qwen3_5.safetensors"));
    let (mut refused, mut ties) = (0, 0);
    for row in goldens.i64("sizes").chunks_exact(7) {
        let [height, width, factor, least, most] = [0, 1, 2, 3, 4].map(|at| row[at] as usize);
        let resized = for_factor(factor, least, most).resized(height, width);
        if row[5] < 0 {
            assert!(matches!(resized, Err(PictureFault::Shape { .. })), "{row:?}");
            refused += 1;
        } else {
            assert_eq!(resized.unwrap(), (row[5] as usize, row[6] as usize), "{row:?}");
            ties += usize::from(height % factor == factor / 2);
        }
    }
    assert!(refused > 10 && ties > 10, "{refused} refused, {ties} ties");
}

#[test]
fn patches_equal_those_of_the_pillow_backend() {
    let goldens = Tensors::open(&fixture("imaging/qwen3_5.safetensors"));
    let large = Qwen3_5ImageSettings { min_pixels: 4096, max_pixels: 8192, ..RELEASED };
    for (name, size, settings) in
        [("wide", "p4", tiny()), ("tall", "p4", tiny()), ("square", "p4", tiny()), ("square", "p16", large)]
    {
        let patches = settings.patches(&load(&format!("{name}.png"))).unwrap();
        let golden = |field: &str| format!("{name}.{size}.{field}");
        assert_eq!([patches.patches, patches.patch_dim], goldens.shape(&golden("pixel_values"))[..]);
        assert!(patches.pixels == goldens.f32(&golden("pixel_values")), "{name} {size}: pixels differ"); // bit for bit
        assert_eq!(patches.grid_thw.map(|n| n as i64), goldens.i64(&golden("image_grid_thw"))[..]);
        assert_eq!(
            patches.resized,
            (patches.grid_thw[1] * settings.patch_size, patches.grid_thw[2] * settings.patch_size)
        );
        assert_eq!(patches.soft_tokens * settings.merge_size.pow(2), patches.patches);
    }
}

#[test]
fn other_settings_give_the_patches_of_transformers() {
    let goldens = Tensors::open(&data("qwen3_5.safetensors"));
    let merge3 = Qwen3_5ImageSettings {
        patch_size: 2,
        merge_size: 3,
        temporal_patch_size: 3,
        min_pixels: 36,
        max_pixels: 900,
        ..ABSENT
    };
    let levels = Qwen3_5ImageSettings {
        patch_size: 4,
        min_pixels: 64,
        max_pixels: 4096,
        rescale_factor: 1.0,
        normalize: None,
        ..ABSENT
    };
    let mean = Qwen3_5ImageSettings {
        patch_size: 3,
        min_pixels: 36,
        max_pixels: 500,
        rescale_factor: 0.01,
        normalize: Some(([0.1, 0.2, 0.3], [0.5, 0.25, 2.0])),
        ..ABSENT
    };
    for (name, settings) in [("absent", ABSENT), ("merge3", merge3), ("levels", levels), ("mean", mean)] {
        let picture = format!("{name}.picture");
        let shape = goldens.shape(&picture);
        let picture = Picture::from_rgb(shape[1], shape[0], goldens.u8(&picture)).unwrap();
        let patches = settings.patches(&picture).unwrap();
        assert_eq!(patches.grid_thw.map(|n| n as i64), goldens.i64(&format!("{name}.grid"))[..], "{name}");
        assert_eq!([patches.patches, patches.patch_dim], goldens.shape(&format!("{name}.pixels"))[..]);
        assert!(patches.pixels == goldens.f32(&format!("{name}.pixels")), "{name}: pixels differ"); // bit for bit
    }
}

/// The order written down once more, from a picture whose pixels tell where they are.
#[test]
fn patches_stand_square_by_square() {
    let settings = Qwen3_5ImageSettings { patch_size: 2, rescale_factor: 1.0, normalize: None, ..RELEASED };
    let rgb = (0..8 * 12).flat_map(|pixel| [pixel as u8 % 12, pixel as u8 / 12, 200]).collect();
    let patches = settings.patches_as_is(&Picture::from_rgb(12, 8, rgb).unwrap()).unwrap();
    assert_eq!((patches.grid_thw, patches.soft_tokens, patches.patch_dim), ([1, 4, 6], 6, 24));
    let first_six = [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0]];
    assert_eq!(patches.positions[..6], first_six);
    assert_eq!(patches.positions[12..14], [[0, 2], [1, 2]]);
    for (patch, &[x, y]) in patches.pixels.chunks_exact(24).zip(&patches.positions) {
        let (x, y) = (2.0 * x as f32, 2.0 * y as f32);
        let red = [x, x + 1.0, x, x + 1.0];
        let green = [y, y, y + 1.0, y + 1.0];
        assert_eq!(patch, [red, red, green, green, [200.0; 4], [200.0; 4]].concat());
    }
}

#[test]
fn impossible_shapes_are_refused_with_their_size() {
    assert!(matches!(RELEASED.resized(0, 7).unwrap_err(), PictureFault::Shape { width: 7, height: 0, .. }));
    assert!(RELEASED.resized(5, 1000).is_ok());
    let fault = RELEASED.resized(5, 1001).unwrap_err().to_string();
    assert_eq!(
        fault,
        "is 1001 x 5: one side is more than 200 times as long as the other; cut it to a shape closer to a square"
    );
    let fault = RELEASED.patches_as_is(&Picture::from_rgb(48, 32, vec![0; 48 * 32 * 3]).unwrap()).unwrap_err();
    assert_eq!(fault.to_string(), "is 48 x 32: both sides must be multiples of 32 (patch_size x merge_size)");
    let endless = Qwen3_5ImageSettings { min_pixels: usize::MAX, max_pixels: usize::MAX, ..RELEASED };
    assert!(endless.resized(64, 64).unwrap_err().to_string().contains("at most 268435456 pixels"));
}

/// Settings from a folder with one processor file.
fn from_file(name: &str, content: &Value) -> Result<Qwen3_5ImageSettings> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), content.to_string()).unwrap();
    Qwen3_5ImageSettings::from_folder(folder.path())
}

#[test]
fn settings_come_from_the_files() {
    let tiny_expected = Qwen3_5ImageSettings { patch_size: 4, min_pixels: 1024, max_pixels: 2560, ..RELEASED };
    assert_eq!(tiny(), tiny_expected);
    assert_eq!(from_file("preprocessor_config.json", &json!({})).unwrap(), ABSENT);
    let nulls =
        json!({"image_processor": {"size": null, "patch_size": null, "do_pad": null, "image_processor_type": null}});
    assert_eq!(from_file("processor_config.json", &nulls).unwrap(), ABSENT);
    // As transformers 5.24 writes it back.
    let saved = json!({"image_processor": {"do_convert_rgb": true, "do_normalize": true, "do_rescale": true,
        "do_resize": true, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": [0.5, 0.5, 0.5], "merge_size": 2, "patch_size": 4, "resample": 3,
        "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 2560, "shortest_edge": 1024},
        "temporal_patch_size": 2}, "processor_class": "Qwen3VLProcessor"});
    assert_eq!(from_file("processor_config.json", &saved).unwrap(), tiny_expected);
    // The older names win over the edges.
    let older =
        json!({"min_pixels": 100, "max_pixels": 900, "size": {"shortest_edge": 1, "min_pixels": 3, "max_pixels": 4}});
    let expected = Qwen3_5ImageSettings { min_pixels: 100, max_pixels: 900, ..ABSENT };
    assert_eq!(from_file("preprocessor_config.json", &older).unwrap(), expected);
    let one = json!({"min_pixels": 100, "size": {"longest_edge": 900}, "image_mean": 0.5, "image_std": 0.25});
    let expected = Qwen3_5ImageSettings { normalize: Some(([0.5; 3], [0.25; 3])), ..expected };
    assert_eq!(from_file("preprocessor_config.json", &one).unwrap(), expected);
    let plain = json!({"do_rescale": false, "do_normalize": false, "do_center_crop": false, "rescale_factor": 0.5});
    let expected = Qwen3_5ImageSettings { rescale_factor: 1.0, normalize: None, ..ABSENT };
    assert_eq!(from_file("preprocessor_config.json", &plain).unwrap(), expected);
    let none = from_file("config.json", &json!({"model_type": "qwen3_5"})).unwrap_err();
    assert!(matches!(none, Error::MissingFile { .. }), "{none}");
}

#[test]
fn unsupported_settings_are_refused_by_field_and_value() {
    let cases = [
        ("resample", json!(2), "only 3 (bicubic)"),
        ("do_resize", json!(false), "only true"),
        ("do_convert_rgb", json!(false), "only true"),
        ("do_center_crop", json!(true), "only false"),
        ("do_pad", json!(1), "true or false"),
        ("do_normalize", json!("yes"), "true or false"),
        ("patch_size", json!(0), "1 to 1024"),
        ("patch_size", json!(u64::MAX), "1 to 1024"),
        ("merge_size", json!(65), "1 to 64"),
        ("temporal_patch_size", json!(0), "1 to 64"),
        ("temporal_patch_size", json!(1.5), "whole number"),
        ("min_pixels", json!(0), "at least 1"),
        ("max_pixels", json!(-4), "whole number"),
        ("size", json!(224), "an object with shortest_edge and longest_edge"),
        ("size", json!({"shortest_edge": 4}), "longest_edge must be"),
        ("size", json!({"shortest_edge": 0, "longest_edge": 9}), "shortest_edge must be"),
        ("size", json!({"height": 4, "longest_edge": 9, "shortest_edge": 4}), "not height"),
        ("size", json!({"longest_edge": 9, "min_pixels": 4, "shortest_edge": 4}), "not min_pixels"),
        ("rescale_factor", json!("1/255"), "a number"),
        ("image_mean", json!([0.5, 0.5]), "a list of three numbers"),
        ("image_mean", json!([0.5, null, 0.5, 0.5]), "a list of three numbers"),
        ("image_mean", json!(1e300), "a list of three numbers"),
        ("image_std", json!([1, 0, 1]), "not be 0"),
        ("image_processor_type", json!("Gemma4ImageProcessor"), "only Qwen"),
        ("image_processor_type", json!(3), "only Qwen"),
    ];
    for (field, value, reason) in cases {
        let message = from_file("processor_config.json", &json!({"image_processor": {field: value}}));
        let message = message.unwrap_err().to_string();
        let start = format!("processor_config.json: image_processor.{field} is {value}: ");
        assert!(message.starts_with(&start) && message.contains(reason), "{message}");
    }
    let class = json!({"image_processor": {}, "processor_class": "Gemma4Processor"});
    assert!(from_file("processor_config.json", &class).unwrap_err().to_string().contains("only Qwen"));
    let by_hand = Qwen3_5ImageSettings { merge_size: 0, ..RELEASED }.check().unwrap_err().to_string();
    assert_eq!(by_hand, "image settings: merge_size is 0: 1 to 64 are allowed");
}
