//! Lengths as bars of text.

use std::ops::RangeInclusive;

/// Longest bar, in columns: with numbers of up to ten digits a line fits 80 columns.
const BAR: usize = 40;
/// Most ranges of one width.
const MOST: usize = 12;

/// One line per range of lengths, with a bar and the number of samples in it; empty without lengths.
pub(crate) fn histogram(lengths: &[usize]) -> String {
    let (Some(&shortest), Some(&longest)) = (lengths.iter().min(), lengths.iter().max()) else {
        return String::new();
    };
    let ranges = ranges(shortest, longest);
    let count = |range: &RangeInclusive<usize>| lengths.iter().filter(|&length| range.contains(length)).count();
    let counts: Vec<usize> = ranges.iter().map(count).collect();
    let most = counts.iter().max().copied().unwrap_or(0).max(1);
    let digits = ranges.last().map_or(0, |range| range.end().to_string().len());
    let line = |(range, count): (&RangeInclusive<usize>, usize)| {
        let (start, end) = (range.start(), range.end());
        let label = match start == end {
            true => format!("{start:>width$}", width = 2 * digits + 4),
            false => format!("{start:>digits$} to {end:>digits$}"),
        };
        let bar = "█".repeat((BAR * count).div_ceil(most));
        format!("{}\n", format!("{label}  {bar} {count}").trim_end())
    };
    ranges.iter().zip(counts).map(line).collect()
}

/// Ranges that cover all lengths: of one round width, or each twice as wide as the one before it if the longest sample
/// is many times as long as the shortest.
fn ranges(shortest: usize, longest: usize) -> Vec<RangeInclusive<usize>> {
    if longest / 8 >= shortest.max(1) {
        let first = 1 << shortest.max(1).ilog2();
        let starts = std::iter::successors(Some(first), |start: &usize| start.checked_mul(2));
        // Only an empty sample is shorter than 1.
        let range = |start: usize| (if start == first { start.min(shortest) } else { start })..=(start + (start - 1));
        return starts.take_while(|&start| start <= longest).map(range).collect();
    }
    let fits = |width: &usize| longest / width - shortest / width < MOST;
    let width = round_numbers().find(fits).unwrap_or(longest);
    (shortest / width..=longest / width).map(|n| n * width..=n * width + (width - 1)).collect()
}

/// 1, 2, 5, 10, 20, 50, ...
fn round_numbers() -> impl Iterator<Item = usize> {
    let decades = std::iter::successors(Some(1usize), |decade| decade.checked_mul(10));
    decades.take_while(|&decade| decade <= usize::MAX / 5).flat_map(|decade| [decade, 2 * decade, 5 * decade])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_lengths_come_in_ranges_of_one_round_width() {
        assert_eq!(ranges(60, 60), [60..=60]);
        assert_eq!(ranges(19, 30).len(), 12);
        assert_eq!(ranges(19, 31), [18..=19, 20..=21, 22..=23, 24..=25, 26..=27, 28..=29, 30..=31]);
        assert_eq!(ranges(19, 48), [15..=19, 20..=24, 25..=29, 30..=34, 35..=39, 40..=44, 45..=49]);
        assert_eq!(ranges(101, 799).first(), Some(&(100..=199)));
        assert_eq!(ranges(101, 799).len(), 7);
    }

    #[test]
    fn lengths_of_every_size_come_in_doubling_ranges() {
        assert_eq!(ranges(3, 30), [2..=3, 4..=7, 8..=15, 16..=31]);
        assert_eq!(ranges(16, 128), [16..=31, 32..=63, 64..=127, 128..=255]);
        assert_eq!(ranges(0, 8), [0..=1, 2..=3, 4..=7, 8..=15]);
    }

    #[test]
    fn every_length_is_in_one_range() {
        for (shortest, longest) in [(0, 0), (0, 7), (1, 1), (1, 7), (1, 9), (13, 14), (99, 791), (1, 1 << 24)] {
            let ranges = ranges(shortest, longest);
            assert!(*ranges[0].start() <= shortest && longest <= *ranges.last().unwrap().end(), "{ranges:?}");
            assert!(ranges.windows(2).all(|pair| pair[0].end() + 1 == *pair[1].start()), "{ranges:?}");
            assert!(ranges.len() <= 25, "{ranges:?}");
        }
    }

    #[test]
    fn bars_are_as_long_as_their_counts() {
        let bar = |columns: usize| "█".repeat(columns);
        let lengths = [vec![9; 4], vec![10; 2], vec![12]].concat();
        let expected = format!(" 9  {} 4\n10  {} 2\n11   0\n12  {} 1\n", bar(40), bar(20), bar(10));
        let text: String = histogram(&lengths).lines().map(|line| format!("{}\n", &line[6..])).collect();
        assert_eq!(text, expected);
        assert_eq!(histogram(&[]), "");
        // One of many is still seen, and the widest line fits.
        let lengths = [vec![1; 100_000], vec![(1 << 33) - 1]].concat();
        let text = histogram(&lengths);
        assert!(text.ends_with(&format!("{} 1\n", bar(1))), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
}
