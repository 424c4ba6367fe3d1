//! Qwen 3.5's positions against transformers and against the rule walked token by token.

mod support;

use candle_vlm_processor::qwen3_5::{image_runs, mrope_positions};
use candle_vlm_processor::{Error, Result};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};
use support::{Tensors, data, fixture};

fn case(name: &str) -> Tensors {
    Tensors::open(&fixture(&format!("qwen3_5-dense/goldens/{name}.safetensors")))
}

fn grids(tensors: &Tensors, name: &str) -> Vec<[usize; 3]> {
    tensors.i64(name).chunks_exact(3).map(|grid| [0, 1, 2].map(|axis| grid[axis] as usize)).collect()
}

/// A row of tokens and where they have to stand.
#[derive(Clone, Debug, Default)]
struct Row {
    types: Vec<u8>,
    documents: Vec<i64>,
    grids: Vec<[usize; 3]>,
    positions: [Vec<i64>; 3],
}

/// The rows of a golden, with the grids of their pictures.
fn rows(golden: &Tensors) -> Vec<Row> {
    let shape = golden.shape("input.mm_token_type_ids");
    let (batch, len) = (shape[0], shape[1]);
    let has = |name: &str| golden.names().iter().any(|n| n == name);
    let types = golden.i64("input.mm_token_type_ids");
    let positions = golden.i64("input.position_ids");
    let documents = match (has("input.doc_ids"), has("input.attention_mask")) {
        (true, _) => golden.i64("input.doc_ids"),
        (_, true) => golden.i64("input.attention_mask").iter().map(|mask| mask - 1).collect(),
        _ => vec![0; batch * len],
    };
    let mut left = if has("input.image_grid_thw") { grids(golden, "input.image_grid_thw") } else { vec![] };
    let row = |n: usize| {
        let tokens = n * len..(n + 1) * len;
        let axis = |axis: usize| positions[(axis * batch + n) * len..][..len].to_vec();
        let types: Vec<u8> = types[tokens.clone()].iter().map(|&t| t as u8).collect();
        let documents = documents[tokens].to_vec();
        let pictures = image_runs(&types, &documents).unwrap().len();
        let grids = left.drain(..pictures).collect();
        Row { types, documents, grids, positions: [0, 1, 2].map(axis) }
    };
    let rows = (0..batch).map(row).collect();
    assert!(left.is_empty(), "{left:?}");
    rows
}

#[test]
fn positions_equal_those_of_transformers() {
    let mut pictures = 0;
    for name in ["case1_text", "case2_images", "case3_padded", "case4_packed", "case6_chat"] {
        for row in rows(&case(name)) {
            let positions = mrope_positions(&row.types, &row.documents, &row.grids, 2).unwrap();
            assert_eq!(positions, row.positions, "{name}");
            pictures += row.grids.len();
        }
    }
    assert_eq!(pictures, 8);
}

#[test]
fn positions_of_more_rows_equal_those_of_transformers() {
    let golden = Tensors::open(&data("qwen3_5.safetensors"));
    let mut pictures = 0;
    for n in 0..12 {
        let types = golden.u8(&format!("rows.{n}.types"));
        let grids = grids(&golden, &format!("rows.{n}.grids"));
        let positions = mrope_positions(&types, &vec![5; types.len()], &grids, 2).unwrap();
        assert_eq!(positions.concat(), golden.i64(&format!("rows.{n}.positions")));
        pictures += grids.len();
    }
    assert!(pictures > 12);
}

/// A row by its parts: texts of some length, pictures of some merged size.
#[derive(Clone, Debug)]
enum Segment {
    Text(usize),
    Picture(usize, usize),
}

/// A document never has two pictures side by side; it may begin and end with one.
fn document() -> impl Strategy<Value = Vec<Segment>> {
    let pair = (0usize..4, 1usize..5, 1usize..5);
    (prop::collection::vec(pair, 0..4), 0usize..4).prop_map(|(pairs, tail)| {
        let mut segments = Vec::new();
        for (n, (text, height, width)) in pairs.into_iter().enumerate() {
            segments.push(Segment::Text(if n > 0 { text + 1 } else { text }));
            segments.push(Segment::Picture(height, width));
        }
        segments.push(Segment::Text(tail));
        segments
    })
}

/// What a row's tokens are and where they stand, token by token; every position is found from those before.
fn slow(row: &[Vec<Segment>], merge: usize) -> Row {
    let Row { mut types, mut documents, mut grids, mut positions } = Row::default();
    for (id, segments) in row.iter().enumerate() {
        let begin = types.len();
        for segment in segments {
            // The next position is one more than the largest so far of this document, on any axis.
            let next = positions.iter().flat_map(|axis: &Vec<i64>| &axis[begin..]).max().map_or(0, |max| max + 1);
            let tokens: Vec<[i64; 3]> = match *segment {
                Segment::Text(len) => (0..len as i64).map(|n| [next + n; 3]).collect(),
                Segment::Picture(height, width) => {
                    grids.push([1, height * merge, width * merge]);
                    let of_row = |y| (0..width as i64).map(move |x| [next, next + y, next + x]);
                    (0..height as i64).flat_map(of_row).collect()
                }
            };
            types.resize(types.len() + tokens.len(), u8::from(matches!(segment, Segment::Picture(..))));
            documents.resize(types.len(), 7 - id as i64);
            for token in tokens {
                (0..3).for_each(|axis| positions[axis].push(token[axis]));
            }
        }
    }
    Row { types, documents, grids, positions }
}

proptest! {
    #![proptest_config(Config {
        cases: 300, rng_seed: RngSeed::Fixed(11), failure_persistence: None, ..Config::default()
    })]

    #[test]
    fn positions_of_packed_rows_equal_the_rule(
        row in prop::collection::vec(document(), 0..5), merge in 1usize..4, padding in 0usize..4,
    ) {
        let Row { mut types, mut documents, grids, positions: mut expected } = slow(&row, merge);
        types.resize(types.len() + padding, 1); // what stands in padding does not count
        documents.resize(types.len(), -1);
        expected.iter_mut().for_each(|axis| axis.resize(types.len(), 0));
        let positions = mrope_positions(&types, &documents, &grids, merge).unwrap();
        prop_assert_eq!(&positions, &expected);
        prop_assert_eq!(image_runs(&types, &documents).unwrap().len(), grids.len());
        // Every document as if it stood alone.
        let mut used = 0;
        for id in 0..row.len() as i64 {
            let tokens: Vec<_> = (0..types.len()).filter(|&at| documents[at] == 7 - id).collect();
            let alone: Vec<u8> = tokens.iter().map(|&at| types[at]).collect();
            let zeros = vec![0; alone.len()];
            let these = &grids[used..used + image_runs(&alone, &zeros).unwrap().len()];
            used += these.len();
            let alone = mrope_positions(&alone, &zeros, these, merge).unwrap();
            for axis in 0..3 {
                let packed: Vec<_> = tokens.iter().map(|&at| positions[axis][at]).collect();
                prop_assert_eq!(&packed, &alone[axis]);
            }
        }
    }

    #[test]
    fn any_row_gives_positions_or_an_error(
        types in prop::collection::vec(0u8..3, 0..12), documents in prop::collection::vec(-1i64..3, 0..12),
        grids in prop::collection::vec(prop::array::uniform3(0usize..5), 0..3), merge in 0usize..3,
    ) {
        if let Ok(positions) = mrope_positions(&types, &documents, &grids, merge) {
            prop_assert!(positions.iter().all(|axis| axis.len() == types.len()));
        }
    }
}

fn fault(result: Result<[Vec<i64>; 3]>) -> Error {
    result.unwrap_err()
}

#[test]
fn rows_that_do_not_fit_their_pictures_are_refused() {
    let grid = [1, 2, 4]; // two tokens
    let positions = |types: &[u8], grids: &[[usize; 3]]| mrope_positions(types, &vec![0; types.len()], grids, 2);
    assert!(positions(&[0, 1, 1, 0, 1, 1], &[grid, grid]).is_ok());
    let touching = fault(positions(&[0, 1, 1, 1, 1, 0], &[grid, grid]));
    assert!(matches!(touching, Error::ImageRun { index: 1, expected: 2, ref run } if *run == (1..5)));
    assert!(touching.to_string().contains("the image tokens 1 to 4 are 4, but picture 1 takes 2"), "{touching}");
    let swapped = fault(positions(&[1, 1, 0, 1, 1, 1], &[grid, [1, 4, 2]]));
    assert!(matches!(swapped, Error::ImageRun { index: 2, expected: 2, .. }));
    for (types, grids) in [(&[0, 1, 1, 0][..], &[grid, grid][..]), (&[1, 1, 0, 1, 1], &[grid]), (&[0, 0], &[grid])] {
        assert!(matches!(fault(positions(types, grids)), Error::ImageRuns { .. }), "{types:?}");
    }
    assert!(fault(positions(&[1, 1], &[])).to_string().starts_with("1 run(s) of image tokens, but 0 picture(s)"));
    assert!(fault(positions(&[0, 2], &[])).to_string().contains("token 1 is of type 2; only 0 (text) and 1 (image)"));
    let documents = |documents: &[i64]| fault(mrope_positions(&[0; 5], documents, &[], 2)).to_string();
    assert!(documents(&[7, 7, 3, 3, 7]).contains("document 7 comes back at token 4"));
    assert!(documents(&[7, 7, -1, 7, 7]).contains("document 7 comes back at token 3"));
    assert!(documents(&[0, 0]).contains("5 token types, but documents of 2 tokens"));
}

#[test]
fn grids_that_no_picture_can_have_are_refused() {
    for (grid, reason) in [
        ([2, 4, 4], "1 patch along time"),
        ([0, 4, 4], "1 patch along time"),
        ([1, 0, 4], "multiples of the merge size 2, and not 0"),
        ([1, 4, 3], "multiples of the merge size 2, and not 0"),
        ([1, 1 << 20, 1 << 20], "more patches than 32 bits can count"),
        ([1, usize::MAX - 1, usize::MAX - 1], "more patches than 32 bits can count"),
    ] {
        let message = fault(mrope_positions(&[], &[], &[[1, 2, 2], grid], 2)).to_string();
        assert!(message.starts_with("picture 2 has ") && message.contains(reason), "{message}");
    }
    assert!(fault(mrope_positions(&[], &[], &[[1, 2, 2]], 0)).to_string().contains("merge size is 0"));
}
