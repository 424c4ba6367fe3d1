//! Gemma 4's image processor against transformers.

mod support;

use candle_vlm_processor::{
    Error, Gemma4ImageSettings, ImageSettings, PatchLayout, Picture, PictureFault, PictureLimits,
};
use serde_json::{Value, json};
use support::{Tensors, data, fixture};

/// The settings of the released models.
const RELEASED: Gemma4ImageSettings = Gemma4ImageSettings {
    patch_size: 16,
    pooling_kernel_size: 3,
    max_soft_tokens: 280,
    rescale_factor: 1.0 / 255.0,
    normalize: None,
    layout: PatchLayout::Tower,
};

fn tiny() -> Gemma4ImageSettings {
    Gemma4ImageSettings::from_folder(&fixture("gemma4-dense/checkpoint")).unwrap()
}

fn load(path: &std::path::Path) -> Picture {
    Picture::decode(&std::fs::read(path).unwrap(), &PictureLimits::default()).unwrap()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

#[test]
fn sizes_equal_those_of_transformers() {
    let sizes = support::json(&fixture("imaging/sizes.json"));
    let sizes = sizes["gemma4"].as_array().unwrap();
    assert!(sizes.len() >= 40);
    for case in sizes {
        let settings = Gemma4ImageSettings {
            patch_size: number(&case["patch_size"]),
            pooling_kernel_size: number(&case["pooling_kernel_size"]),
            max_soft_tokens: number(&case["max_soft_tokens"]),
            ..RELEASED
        };
        let resized = settings.resized(number(&case["height"]), number(&case["width"]));
        match &case["resized"] {
            Value::Null => assert!(resized.is_err(), "{case}"),
            expected => assert_eq!(json!(resized.unwrap()), *expected, "{case}"),
        }
    }
}

#[test]
fn thin_pictures_are_taken() {
    let folder = data("thin");
    let facts = support::json(&folder.join("facts.json"));
    assert_eq!(facts.as_array().unwrap().len(), 9);
    for case in facts.as_array().unwrap() {
        let (height, width) = (number(&case["height"]), number(&case["width"]));
        let picture = load(&folder.join(format!("h{height}-w{width}.png")));
        assert_eq!((picture.height(), picture.width()), (height, width));
        for (key, settings) in [("gemma4 released (patch 16, 280)", RELEASED), ("gemma4 tiny (patch 4, 70)", tiny())] {
            let expected = &case[key];
            let patches = settings.patches(&picture).unwrap();
            assert_eq!(json!(patches.resized), expected["resized"], "{height} x {width} {key}");
            assert_eq!(patches.soft_tokens, number(&expected["soft_tokens"]));
            let real = patches.positions.iter().filter(|p| p[0] >= 0).count();
            assert_eq!(real, patches.soft_tokens * settings.pooling_kernel_size.pow(2));
        }
    }
}

#[test]
fn patches_equal_those_of_the_pillow_backend() {
    let goldens = Tensors::open(&fixture("imaging/gemma4.safetensors"));
    for name in ["wide", "tall", "square"] {
        let patches = tiny().patches(&load(&fixture("imaging").join(format!("{name}.png")))).unwrap();
        let golden = |field: &str| format!("{name}.p4.{field}");
        assert_eq!([patches.patches, patches.patch_dim], goldens.shape(&golden("pixel_values"))[..]);
        assert!(patches.pixels == goldens.f32(&golden("pixel_values")), "{name}: pixels differ"); // bit for bit
        assert_eq!(patches.positions.as_flattened(), goldens.i64(&golden("image_position_ids")));
        assert_eq!(vec![patches.soft_tokens as i64], goldens.i64(&golden("num_soft_tokens")));
        let (height, width) = patches.resized;
        assert_eq!(vec![height as i64, width as i64], goldens.i64(&golden("resized")));
        // torchvision rounds differently; one side of `wide` shrinks while the other grows.
        let levels = goldens.u8(&golden("torchvision_u8"));
        let ours: Vec<u8> = patches.pixels[..levels.len()].iter().map(|p| (p * 255.0).round() as u8).collect();
        assert!(support::largest_difference(&ours, &levels) <= 8, "{name}");
    }
}

#[test]
fn large_patches_equal_the_resized_picture() {
    let settings = Gemma4ImageSettings { max_soft_tokens: 70, ..RELEASED };
    let patches = settings.patches(&load(&fixture("imaging/square.png"))).unwrap();
    let resized = load(&fixture("imaging/square.p16.resized.png"));
    assert_eq!(patches.resized, (resized.height(), resized.width()));
    let goldens = Tensors::open(&fixture("imaging/gemma4.safetensors"));
    let positions = goldens.i64("square.p16.image_position_ids");
    assert_eq!(patches.positions.as_flattened()[..positions.len()], positions);
    let row = resized.width() / 16;
    for (index, patch) in patches.pixels.chunks_exact(patches.patch_dim).take(positions.len() / 2).enumerate() {
        for (at, pixel) in patch.chunks_exact(3).enumerate() {
            let expected = resized.pixel(index % row * 16 + at % 16, index / row * 16 + at / 16);
            assert_eq!(pixel, expected.map(|level| (f64::from(level) / 255.0) as f32));
        }
    }
}

#[test]
fn merged_patches_equal_those_of_transformers() {
    let goldens = Tensors::open(&data("unified.safetensors"));
    let settings = Gemma4ImageSettings {
        patch_size: 4,
        pooling_kernel_size: 2,
        max_soft_tokens: 70,
        layout: PatchLayout::Merged,
        ..RELEASED
    };
    for (name, tolerance) in [("exact", 0), ("wide", 8)] {
        let picture = format!("{name}.picture");
        let shape = goldens.shape(&picture);
        let patches = settings.patches(&Picture::from_rgb(shape[1], shape[0], goldens.u8(&picture)).unwrap()).unwrap();
        let levels = goldens.u8(&format!("{name}.levels"));
        assert_eq!([patches.soft_tokens, patches.patch_dim], goldens.shape(&format!("{name}.levels"))[..]);
        assert_eq!((patches.patches, patches.pixels.len()), (70, 70 * 192));
        let ours: Vec<u8> = patches.pixels[..levels.len()].iter().map(|p| (p * 255.0).round() as u8).collect();
        let found = support::largest_difference(&ours, &levels);
        assert!(found <= tolerance, "{name}: {found} levels");
        assert!(patches.pixels[levels.len()..].iter().all(|&p| p == 0.0));
        assert_eq!(patches.positions.as_flattened(), goldens.i64(&format!("{name}.positions")));
    }
}

#[test]
fn impossible_shapes_are_refused_with_their_size() {
    let fault = RELEASED.resized(0, 7).unwrap_err();
    assert!(matches!(fault, PictureFault::Shape { width: 7, height: 0, .. }));
    let fault = RELEASED.resized(3, 40_000).map(|_| ());
    assert!(fault.is_ok(), "{fault:?}"); // capped, as transformers does it
}

/// Settings from a folder with one processor file.
fn from_file(name: &str, content: &Value) -> Result<Gemma4ImageSettings, Error> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), content.to_string()).unwrap();
    Gemma4ImageSettings::from_folder(folder.path())
}

#[test]
fn settings_come_from_the_files() {
    let settings = tiny();
    assert_eq!((settings.patch_size, settings.pooling_kernel_size, settings.max_soft_tokens), (4, 3, 70));
    assert_eq!(settings.layout, PatchLayout::Tower);
    let older = from_file("preprocessor_config.json", &json!({"patch_size": 8, "pooling_kernel_size": 2}));
    assert_eq!(older.unwrap(), Gemma4ImageSettings { patch_size: 8, pooling_kernel_size: 2, ..RELEASED });
    let unified = json!({"image_processor": {"image_processor_type": "Gemma4UnifiedImageProcessor"}});
    assert_eq!(from_file("processor_config.json", &unified).unwrap().layout, PatchLayout::Merged);
    let by_processor = json!({"image_processor": {}, "processor_class": "Gemma4UnifiedProcessor"});
    assert_eq!(from_file("processor_config.json", &by_processor).unwrap().layout, PatchLayout::Merged);
    let config = json!({"model_type": "gemma4_unified", "vision_soft_tokens_per_image": 140,
        "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 24}});
    let expected = Gemma4ImageSettings {
        patch_size: 4,
        pooling_kernel_size: 2,
        max_soft_tokens: 140,
        layout: PatchLayout::Merged,
        ..RELEASED
    };
    assert_eq!(from_file("config.json", &config).unwrap(), expected);
    let none = from_file("config.json", &json!({"model_type": "gemma4"})).unwrap_err();
    assert!(matches!(none, Error::MissingFile { .. }), "{none}");
}

#[test]
fn normalization_follows_the_file() {
    let file = json!({"image_processor": {"patch_size": 4, "max_soft_tokens": 70, "do_normalize": true,
        "image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 1.0, 2.0]}});
    let settings = from_file("processor_config.json", &file).unwrap();
    let picture = Picture::from_rgb(12, 12, [255, 51, 0].repeat(144)).unwrap();
    let pixels = settings.patches(&picture).unwrap().pixels;
    assert_eq!(pixels[..3], [(1.0 - 0.5) / 0.5, (51.0 / 255.0) as f32 - 0.25, 0.0]);
}

#[test]
fn unsupported_settings_are_refused_by_field_and_value() {
    let cases = [
        ("resample", json!(2), "only 3 (bicubic)"),
        ("max_soft_tokens", json!(100), "70, 140, 280, 560 or 1120"),
        ("do_resize", json!(false), "only true"),
        ("do_rescale", json!(false), "only true"),
        ("do_convert_rgb", json!(false), "only true"),
        ("do_resize", json!("yes"), "true or false"),
        ("patch_size", json!(0), "1 to 1024"),
        ("patch_size", json!(-4), "whole number"),
        ("pooling_kernel_size", json!(1.5), "whole number"),
        ("rescale_factor", json!("1/255"), "a number"),
        ("image_processor_type", json!("Qwen2VLImageProcessor"), "only Gemma 4"),
    ];
    for (field, value, reason) in cases {
        let message = from_file("processor_config.json", &json!({"image_processor": {field: value}}));
        let message = message.unwrap_err().to_string();
        let start = format!("processor_config.json: image_processor.{field} is {value}: ");
        assert!(message.starts_with(&start) && message.contains(reason), "{message}");
    }
    let std = json!({"image_processor": {"do_normalize": true, "image_std": [1, 0, 1]}});
    assert!(from_file("processor_config.json", &std).unwrap_err().to_string().contains("image_std"));
}
