//! Embeddings: the scale, the padding row, and images in the places of their placeholders.

mod support;

use candle_core::{DType, Device, IndexOp, Tensor};
use candle_gemma4::{Config, Error, Inputs, Model, Weights};
use support::{Case, checkpoint, difference, edited_config, fixture, values};

const IMAGE: u32 = 19;
const EMBED: &str = "model.language_model.embed_tokens.weight";

fn load(dtype: DType) -> (Weights, Model) {
    let config = Config::from_folder(&checkpoint()).unwrap();
    let weights = Weights::load(&checkpoint(), &config, dtype, &Device::Cpu).unwrap();
    let model = Model::new(&config, &weights).unwrap();
    (weights, model)
}

fn ids(rows: &[&[u32]]) -> Tensor {
    let rows: Vec<Vec<u32>> = rows.iter().map(|row| row.to_vec()).collect();
    Tensor::new(rows, &Device::Cpu).unwrap()
}

/// Pictures of 12 and 20 soft tokens, in this order.
fn pictures() -> (Tensor, Tensor) {
    let case = Case::load(&fixture("gemma4-dense/goldens/case2_images.safetensors"));
    (case.get("input.pixel_values").clone(), case.get("input.image_position_ids").clone())
}

/// A row of `runs` of placeholders with one text token before each and one at the end.
fn row(runs: &[usize]) -> Vec<u32> {
    let mut row = Vec::new();
    for &run in runs {
        row.push(300);
        row.extend(std::iter::repeat_n(IMAGE, run));
    }
    row.push(301);
    row
}

fn with_pictures(rows: &[&[u32]], images: &[u32]) -> Inputs {
    let (pixels, positions) = pictures();
    let images = Tensor::new(images, &Device::Cpu).unwrap();
    Inputs {
        pixel_values: Some(pixels.index_select(&images, 0).unwrap()),
        image_position_ids: Some(positions.index_select(&images, 0).unwrap()),
        ..Inputs::text(ids(rows))
    }
}

fn error(inputs: &Inputs) -> Error {
    load(DType::F32).1.embed(inputs, &mut ()).unwrap_err()
}

#[test]
fn the_scale_is_rounded_to_the_type_of_the_weights() {
    for (dtype, scale) in [(DType::BF16, 5.65625), (DType::F16, 5.65625), (DType::F32, f64::from(32f32.sqrt()))] {
        let (weights, model) = load(dtype);
        let embeds = model.embed(&Inputs::text(ids(&[&[7, 500]])), &mut ()).unwrap();
        assert_eq!(embeds.dtype(), dtype);
        let rows = weights.variables()[EMBED].i(7).unwrap().to_dtype(DType::F64).unwrap();
        let expected = (rows * scale).unwrap().to_dtype(dtype).unwrap();
        assert_eq!(values(&embeds.i((0, 0)).unwrap()), values(&expected), "{dtype:?}");
    }
}

#[test]
fn the_padding_row_is_looked_up_but_not_trained_by_it() {
    let (weights, model) = load(DType::F32);
    let embeds = model.embed(&Inputs::text(ids(&[&[5, 0, 5], &[0, 9, 0]])), &mut ()).unwrap();
    let table = &weights.variables()[EMBED];
    let pad = (table.i(0).unwrap() * 32f64.sqrt()).unwrap();
    assert!(difference(&embeds.i((1, 2)).unwrap(), &pad) < 1e-6);
    let gradients = embeds.sum_all().unwrap().backward().unwrap();
    let gradient = gradients.get(table).unwrap();
    let scale = f64::from(32f32.sqrt());
    for (id, expected) in [(0, 0.0), (5, 2.0 * scale), (9, scale), (7, 0.0)] {
        let row = values(&gradient.i(id).unwrap());
        assert!(row.iter().all(|value| (value - expected).abs() < 1e-5), "row {id}: {row:?}");
    }
}

#[test]
fn a_model_without_a_padding_token_trains_every_row() {
    let config = edited_config(&[("text_config.pad_token_id", "null")]);
    let weights = Weights::load(&checkpoint(), &config, DType::F32, &Device::Cpu).unwrap();
    let embeds = Model::new(&config, &weights).unwrap().embed(&Inputs::text(ids(&[&[0, 3]])), &mut ()).unwrap();
    let gradients = embeds.sum_all().unwrap().backward().unwrap();
    let row = values(&gradients.get(&weights.variables()[EMBED]).unwrap().i(0).unwrap());
    assert!(row.iter().all(|value| (value - 32f64.sqrt()).abs() < 1e-5));
}

#[test]
fn rows_of_padding_only_are_embedded() {
    let (_, model) = load(DType::F32);
    let embeds = model.embed(&Inputs::text(ids(&[&[0, 0, 0]])), &mut ()).unwrap();
    assert_eq!(embeds.dims(), [1, 3, 32]);
    assert!(support::largest(&embeds) > 0.1);
}

#[test]
fn features_go_to_their_placeholders_in_order() {
    let (_, model) = load(DType::F32);
    let mut taps = std::collections::BTreeMap::new();
    let (first, second) = (row(&[12]), row(&[20]));
    let mut padded = first.clone();
    padded.resize(second.len(), 0);
    let embeds = model.embed(&with_pictures(&[&padded, &second], &[0, 1]), &mut taps).unwrap();
    let features = &taps["vision.features"];
    assert_eq!(difference(&embeds.i((0, 1..13)).unwrap(), &features.i(0..12).unwrap()), 0.0);
    assert_eq!(difference(&embeds.i((1, 1..21)).unwrap(), &features.i(12..32).unwrap()), 0.0);
    let text = model.embed(&Inputs::text(ids(&[&[300, 301]])), &mut ()).unwrap();
    assert_eq!(difference(&embeds.i((1, 21)).unwrap(), &text.i((0, 1)).unwrap()), 0.0);
}

#[test]
fn two_images_may_share_a_run() {
    let (_, model) = load(DType::F32);
    let apart = model.embed(&with_pictures(&[&row(&[12, 20])], &[0, 1]), &mut ()).unwrap();
    let together = model.embed(&with_pictures(&[&row(&[32])], &[0, 1]), &mut ()).unwrap();
    assert_eq!(difference(&apart.i((0, 14..34)).unwrap(), &together.i((0, 13..33)).unwrap()), 0.0);
}

#[test]
fn runs_that_images_do_not_fill_are_refused() {
    let splice = |inputs: &Inputs| match error(inputs) {
        Error::Splice { row, start, placeholders, kind: "image", item, features } => {
            (row, start, placeholders, item, features)
        }
        other => panic!("{other}"),
    };
    assert_eq!(splice(&with_pictures(&[&row(&[11])], &[0])), (0, 1, 11, 0, 12));
    assert_eq!(splice(&with_pictures(&[&row(&[12, 21])], &[0, 1])), (0, 14, 21, 1, 20));
    assert_eq!(splice(&with_pictures(&[&row(&[20, 12])], &[0, 1])), (0, 1, 20, 0, 32), "images in another order");
    assert_eq!(splice(&Inputs::text(ids(&[&[1, 2, 3], &[4, IMAGE, IMAGE]]))), (1, 1, 2, 0, 0));
    let message = error(&with_pictures(&[&[1; 13], &row(&[11])], &[0])).to_string();
    assert!(message.starts_with("row 1, tokens from 1: 11 image placeholder(s)"), "{message}");
    assert!(message.contains("(from image 0 on) give 12 feature(s)"), "{message}");
    let left = error(&with_pictures(&[&row(&[12])], &[0, 1])).to_string();
    assert!(left.starts_with("2 image(s) given, but the placeholders of the batch take only 1"), "{left}");
}

#[test]
fn ids_and_placeholders_without_a_meaning_are_refused() {
    let message = error(&Inputs::text(ids(&[&[1, 2], &[3, 512]]))).to_string();
    assert!(message.starts_with("row 1, token 1: id 512 is outside the vocabulary of 512"), "{message}");
    let negative = Tensor::new(&[[4i64, -7]], &Device::Cpu).unwrap();
    assert!(matches!(error(&Inputs::text(negative)), Error::TokenId { row: 0, index: 1, id: -7, .. }));
    let message = error(&Inputs::text(ids(&[&[1, 23]]))).to_string();
    assert!(message.starts_with("row 0, token 1: id 23 is a placeholder for video, which is not supported"));
    assert!(matches!(error(&Inputs::text(ids(&[&[20]]))), Error::Placeholder { kind: "audio", .. }));
}

/// On every rank, as only here all of them see all ids.
#[test]
fn ids_that_the_table_of_per_layer_embeddings_lacks_are_refused() {
    let folder = support::variant("effective_plain_mlp"); // 72 ids, 66 of them with per-layer embeddings
    let config = Config::from_folder(&folder).unwrap();
    let weights = Weights::load(&folder, &config, DType::F32, &Device::Cpu).unwrap();
    let model = Model::new(&config, &weights).unwrap();
    assert!(model.embed(&Inputs::text(ids(&[&[65]])), &mut ()).is_ok());
    let message = model.embed(&Inputs::text(ids(&[&[1, 2], &[65, 66]])), &mut ()).unwrap_err().to_string();
    let expected = "row 1, token 1: id 66 is outside the vocabulary of 66 (vocab_size_per_layer_input in config.json)";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn pixels_and_positions_must_fit_the_tower_and_each_other() {
    let good = with_pictures(&[&row(&[12])], &[0]);
    let (pixels, positions) = (good.pixel_values.clone().unwrap(), good.image_position_ids.clone().unwrap());
    let message = |pixel_values, image_position_ids| {
        error(&Inputs { pixel_values, image_position_ids, ..good.clone() }).to_string()
    };
    let narrow = pixels.narrow(2, 0, 47).unwrap();
    let expected = "input pixel_values: found [1, 198, 47]; expected [images, patches, 48] (3 colours, patch_size 4)";
    assert_eq!(message(Some(narrow), Some(positions.clone())), expected);
    let short = positions.narrow(1, 0, 190).unwrap();
    let expected = "input image_position_ids: found [1, 190, 2]; expected [1, 198, 2], to fit pixel_values";
    assert_eq!(message(Some(pixels.clone()), Some(short)), expected);
    assert!(message(Some(pixels.clone()), None).starts_with("input image_position_ids: found none"));
    assert!(message(None, Some(positions.clone())).starts_with("input pixel_values: found none"));
    let far = (&positions * 16.0).unwrap();
    let far = message(Some(pixels.clone()), Some(far));
    assert!(far.starts_with("image 0: patch 8 is at (128, 0); both must be from 0 to 127"), "{far}");
    let cut = positions.narrow(1, 0, 107).unwrap();
    let cut = message(Some(pixels.narrow(1, 0, 107).unwrap()), Some(cut));
    assert!(cut.ends_with("image 0: its grid of 9 x 12 patches is made of 107 patches"), "{cut}");
    let flat = Inputs::text(Tensor::new(&[1u32, 2], &Device::Cpu).unwrap());
    assert_eq!(error(&flat).to_string(), "input input_ids: found [2]; expected [batch, tokens]");
}

#[test]
fn a_text_only_model_takes_no_images() {
    let config = edited_config(&[("vision_config", "null")]);
    let weights = Weights::random(&config, DType::F32, &Device::Cpu, 1).unwrap();
    let model = Model::new(&config, &weights).unwrap();
    assert!(model.embed(&Inputs::text(ids(&[&[5, 6]])), &mut ()).is_ok());
    let message = model.embed(&with_pictures(&[&row(&[12])], &[0]), &mut ()).unwrap_err().to_string();
    assert_eq!(message, "input pixel_values: found images; expected none: this model has no vision_config");
}

#[test]
fn padded_patches_change_nothing() {
    let (_, model) = load(DType::F32);
    let padded = with_pictures(&[&row(&[12])], &[0]);
    let cut = |x: &Option<Tensor>| Some(x.as_ref().unwrap().narrow(1, 0, 108).unwrap());
    let bare = Inputs {
        pixel_values: cut(&padded.pixel_values),
        image_position_ids: cut(&padded.image_position_ids),
        ..padded.clone()
    };
    let embed = |inputs: &Inputs| model.embed(inputs, &mut ()).unwrap();
    assert!(difference(&embed(&padded), &embed(&bare)) < 1e-5);
}
