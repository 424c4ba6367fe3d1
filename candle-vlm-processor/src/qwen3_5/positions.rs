//! The three positions of every token: time, height, width (multimodal rope).

use std::collections::BTreeSet;
use std::ops::Range;

use super::grid;
use crate::error::{Error, Result};

const TEXT: u8 = 0;
const IMAGE: u8 = 1;

/// Where the pictures of one row stand: the runs of image tokens, each inside one document, in order.
///
/// `token_types`: per token 0 for text, 1 for an image. `documents`: per token the id of its document, each id one run;
/// negative for padding, whose token types do not count.
///
/// # Errors
/// The lists differ in length, a token is of another type, or a document comes back behind another or behind padding.
pub fn image_runs(token_types: &[u8], documents: &[i64]) -> Result<Vec<Range<usize>>> {
    check_tokens(token_types, documents)?;
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (at, (&token_type, &document)) in token_types.iter().zip(documents).enumerate() {
        if token_type != IMAGE || document < 0 {
            continue;
        }
        match runs.last_mut().filter(|run| run.end == at && documents[at - 1] == document) {
            Some(run) => run.end = at + 1,
            None => runs.push(at..at + 1),
        }
    }
    Ok(runs)
}

/// The positions of one row, `[3][tokens]`: along time, height and width of pictures.
///
/// A text token stands one behind the token before it on all three axes. A picture whose first token would stand at `s`
/// has time `s` throughout, height `s + row` and width `s + column` on its merged grid; the text behind it goes on at `s`
/// plus the longer side of that grid. Every document starts at 0; padding has 0. `token_types` and `documents` are those
/// of [`image_runs`]; `grids_thw` are the patches of each picture along time, height and width, in order; `merge_size`
/// is how many of them a token stands for along each side.
///
/// DIFFERENCE: transformers counts through a packed row and takes a picture that follows one of the document before for
/// a part of it; here every document is counted as if it stood alone.
///
/// # Errors
/// As [`image_runs`]; a grid that no picture can have; another number of runs than grids; a run of another length than
/// its grid, such as of two pictures without a token between them.
pub fn mrope_positions(
    token_types: &[u8],
    documents: &[i64],
    grids_thw: &[[usize; 3]],
    merge_size: usize,
) -> Result<[Vec<i64>; 3]> {
    grid::check(grids_thw, merge_size)?;
    let runs = image_runs(token_types, documents)?;
    let mut pictures = Vec::with_capacity(grids_thw.len());
    for (index, (run, &[_, height, width])) in runs.iter().zip(grids_thw).enumerate() {
        let (height, width) = (height / merge_size, width / merge_size);
        if run.len() != height * width {
            return Err(Error::ImageRun { index: index + 1, run: run.clone(), expected: height * width });
        }
        pictures.push((run.clone(), height, width));
    }
    if runs.len() != grids_thw.len() {
        return Err(Error::ImageRuns { runs: runs.len(), grids: grids_thw.len() });
    }
    Ok(place(documents, &pictures))
}

/// Walks a row token by token and picture by picture; `pictures` are runs with height and width of the merged grid.
fn place(documents: &[i64], pictures: &[(Range<usize>, usize, usize)]) -> [Vec<i64>; 3] {
    let mut positions: [Vec<i64>; 3] = std::array::from_fn(|_| vec![0; documents.len()]);
    let mut pictures = pictures.iter().peekable();
    let (mut at, mut next) = (0, 0);
    while at < documents.len() {
        if at > 0 && documents[at] != documents[at - 1] {
            next = 0;
        }
        if documents[at] < 0 {
            at += 1;
        } else if let Some((run, height, width)) = pictures.next_if(|(run, ..)| run.start == at) {
            for token in run.clone() {
                let (row, column) = ((token - run.start) / width, (token - run.start) % width);
                positions[0][token] = next;
                positions[1][token] = next + row as i64;
                positions[2][token] = next + column as i64;
            }
            next += *height.max(width) as i64;
            at = run.end;
        } else {
            positions.iter_mut().for_each(|axis| axis[at] = next);
            next += 1;
            at += 1;
        }
    }
    positions
}

fn check_tokens(token_types: &[u8], documents: &[i64]) -> Result<()> {
    if token_types.len() != documents.len() {
        let reason = format!("{} token types, but documents of {} tokens", token_types.len(), documents.len());
        return Err(Error::Row { reason });
    }
    let mut seen = BTreeSet::new();
    for (at, (&document, &token_type)) in documents.iter().zip(token_types).enumerate() {
        if document < 0 {
            continue;
        }
        if ![TEXT, IMAGE].contains(&token_type) {
            let reason = format!("token {at} is of type {token_type}; only 0 (text) and 1 (image) have positions here");
            return Err(Error::Row { reason });
        }
        let begins = at == 0 || documents[at - 1] != document;
        if begins && !seen.insert(document) {
            let reason = format!("document {document} comes back at token {at}; the tokens of a document are one run");
            return Err(Error::Row { reason });
        }
    }
    Ok(())
}
