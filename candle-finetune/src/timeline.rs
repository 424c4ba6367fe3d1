//! One step of all ranks in time, in the trace event format that Chrome and Perfetto show.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use candle_cp::Communicator;
use candle_cp::comm::{Row, Span, Trace, Traffic};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// Records one step of a rank.
#[derive(Debug)]
pub(crate) struct Timeline {
    trace: Trace,
    step: usize,
}

impl Timeline {
    /// Begins to record if it is the wanted step that comes next.
    pub fn start(wanted: Option<usize>, step: usize, comm: &dyn Communicator) -> Option<Self> {
        let trace = (wanted == Some(step)).then(|| comm.trace())?;
        trace.start();
        Some(Self { trace, step })
    }

    /// Ends the recording and gives what all ranks of `comm` recorded as one JSON text, the same on every rank. Every rank
    /// has to call it.
    ///
    /// # Errors
    /// The exchange with another rank failed.
    pub fn finish(self, comm: &dyn Communicator) -> Result<String> {
        let spans: Vec<Sent> = self.trace.stop().iter().map(Sent::from).collect();
        let text = serde_json::to_vec(&spans).map_err(unreadable)?;
        let texts = comm.all_gather_uneven(&Tensor::new(text, &Device::Cpu)?, 0, Traffic::Gather)?;
        let ranks = texts.iter().enumerate().map(|(rank, text)| {
            let spans: Vec<Sent> = serde_json::from_slice(&text.to_vec1::<u8>()?).map_err(unreadable)?;
            Ok((comm.world_rank(rank), spans))
        });
        Ok(trace_events(self.step, &ranks.collect::<Result<Vec<_>>>()?))
    }
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Task { task: "the trace of a step", reason: error.to_string() }
}

/// A span on its way to the other ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Sent {
    /// Place in [`Row::ALL`].
    row: usize,
    name: String,
    /// Nanoseconds since 1970.
    begin: u64,
    end: u64,
    numbers: BTreeMap<String, u64>,
}

impl From<&Span> for Sent {
    fn from(span: &Span) -> Self {
        Self {
            row: span.row as usize,
            name: span.name.to_string(),
            begin: span.begin.as_nanos() as u64,
            end: span.end.as_nanos() as u64,
            numbers: span.numbers.iter().map(|(name, number)| (name.to_string(), *number)).collect(),
        }
    }
}

/// Lines that a row may take: as many messages on their way at a time are beneath each other.
const LINES: usize = 1000;

/// A process for each rank, a thread for each line of a row. One event per line of text; times are microseconds since the
/// first of them.
fn trace_events(step: usize, ranks: &[(usize, Vec<Sent>)]) -> String {
    let first = ranks.iter().flat_map(|(_, spans)| spans).map(|span| span.begin).min().unwrap_or(0);
    let mut events = Vec::new();
    for (rank, spans) in ranks {
        let mut name = |what: &str, tid: usize, args: Value| {
            events.push(json!({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}));
        };
        name("process_name", 0, json!({"name": format!("rank {rank}")}));
        name("process_sort_index", 0, json!({"sort_index": rank}));
        let lines = lines(spans);
        let mut used: Vec<(usize, usize)> = spans.iter().map(|span| span.row).zip(lines.iter().copied()).collect();
        used.sort_unstable();
        used.dedup();
        for (row, line) in used {
            let tid = thread(row, line);
            let of_row = Row::ALL[row].name();
            let text = if line == 0 { of_row.to_string() } else { format!("{of_row} {}", line + 1) };
            name("thread_name", tid, json!({"name": text}));
            name("thread_sort_index", tid, json!({"sort_index": tid}));
        }
        let micros = |nanos: u64| nanos as f64 / 1000.0;
        events.extend(spans.iter().zip(lines).map(|(span, line)| {
            json!({
                "ph": "X", "name": span.name, "cat": Row::ALL[span.row].name(), "pid": rank, "tid": thread(span.row, line),
                "ts": micros(span.begin - first), "dur": micros(span.end.saturating_sub(span.begin)), "args": span.numbers,
            })
        }));
    }
    let events: Vec<String> = events.iter().map(Value::to_string).collect();
    let about = json!({"step": step, "ranks": ranks.len()});
    format!("{{\"displayTimeUnit\": \"ms\", \"otherData\": {about}, \"traceEvents\": [\n{}\n]}}\n", events.join(",\n"))
}

fn thread(row: usize, line: usize) -> usize {
    (row + 1) * LINES + line
}

/// The line of each span among those of its row. Spans of one line follow each other or lie inside of one another, as the
/// format wants it; of messages, which are not parts of one another, each is by itself.
fn lines(spans: &[Sent]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|&i| (spans[i].begin, std::cmp::Reverse(spans[i].end)));
    // By row and line: the ends of the spans that are still going on, the innermost last.
    let mut open: Vec<Vec<Vec<u64>>> = vec![Vec::new(); Row::ALL.len()];
    let mut lines = vec![0; spans.len()];
    for i in order {
        let Sent { row, begin, end, .. } = spans[i];
        let fits = |line: &mut Vec<u64>| {
            line.retain(|&open| open > begin);
            line.last().is_none_or(|&around| end <= around && row != Row::Transfers as usize)
        };
        let of_row = &mut open[row];
        let line = of_row.iter_mut().position(fits).unwrap_or(of_row.len());
        if line == of_row.len() {
            of_row.push(Vec::new());
        }
        of_row[line].push(end);
        lines[i] = line;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_cp::comm::Local;

    fn sent(row: Row, begin: u64, end: u64) -> Sent {
        Sent { row: row as usize, name: "x".to_string(), begin, end, numbers: BTreeMap::new() }
    }

    #[test]
    fn rows_are_numbered_by_their_place() {
        assert!(Row::ALL.into_iter().enumerate().all(|(place, row)| row as usize == place));
    }

    #[test]
    fn spans_of_a_line_nest_and_messages_are_by_themselves() {
        let of = |row, spans: &[(u64, u64)]| {
            lines(&spans.iter().map(|&(begin, end)| sent(row, begin, end)).collect::<Vec<_>>())
        };
        // In each other, after each other, across each other.
        assert_eq!(of(Row::Compute, &[(0, 9), (1, 5), (2, 5), (5, 9), (9, 12)]), [0; 5]);
        assert_eq!(of(Row::Compute, &[(0, 5), (3, 8), (6, 7), (8, 9)]), [0, 1, 0, 0]);
        assert_eq!(of(Row::Compute, &[(1, 2), (0, 5), (0, 9)]), [0; 3], "whatever ended first");
        assert_eq!(of(Row::Transfers, &[(0, 9), (1, 5), (2, 5), (5, 9), (9, 12)]), [0, 1, 2, 1, 0]);
        // Rows do not push each other about.
        assert_eq!(lines(&[sent(Row::Waits, 0, 5), sent(Row::Compute, 3, 8)]), [0, 0]);
    }

    #[test]
    fn times_begin_at_the_first_span_of_any_rank() {
        let late =
            Sent { numbers: [("bytes".to_string(), 7)].into(), ..sent(Row::Transfers, 1_700_000_000_000_002_500, 0) };
        let late = Sent { end: late.begin + 250, ..late };
        let early = sent(Row::Step, 1_700_000_000_000_000_000, 1_700_000_000_000_001_000);
        let json: Value = serde_json::from_str(&trace_events(4, &[(2, vec![late]), (5, vec![early])])).unwrap();
        assert_eq!(json["otherData"], json!({"step": 4, "ranks": 2}));
        let spans: Vec<&Value> = json["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
        let expected = json!({
            "ph": "X", "name": "x", "cat": "transfers", "pid": 2, "tid": 4000, "ts": 2.5, "dur": 0.25, "args": {"bytes": 7}
        });
        assert_eq!(*spans[0], expected);
        assert_eq!((&spans[1]["ts"], &spans[1]["dur"], &spans[1]["pid"]), (&json!(0.0), &json!(1.0), &json!(5)));
    }

    #[test]
    fn only_the_wanted_step_is_recorded() {
        let comm = Local::new();
        for wanted in [None, Some(2)] {
            assert!(Timeline::start(wanted, 1, &comm).is_none());
            drop(comm.trace().span(Row::Step, "unasked"));
        }
        let timeline = Timeline::start(Some(1), 1, &comm).unwrap();
        drop(comm.trace().span(Row::Step, "forward"));
        let json: Value = serde_json::from_str(&timeline.finish(&comm).unwrap()).unwrap();
        let names: Vec<&Value> = json["traceEvents"].as_array().unwrap().iter().map(|event| &event["name"]).collect();
        assert_eq!(names, ["process_name", "process_sort_index", "thread_name", "thread_sort_index", "forward"]);
    }
}
