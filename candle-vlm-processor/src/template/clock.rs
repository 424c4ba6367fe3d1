//! `strftime_now`: dates for templates that tell the model what day it is.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A moment in UTC.
struct Moment {
    year: i64,
    /// 1 to 12.
    month: i64,
    /// 1 to 31.
    day: i64,
    /// 0: Sunday.
    weekday: i64,
    /// 1 to 366.
    year_day: i64,
    /// Seconds since midnight.
    seconds: i64,
}

impl Moment {
    fn new(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => after.as_secs() as i64,
            Err(before) => -(before.duration().as_secs() as i64),
        };
        let days = seconds.div_euclid(86_400);
        let (mut year, mut left) = (1970 + days.div_euclid(146_097) * 400, days.rem_euclid(146_097));
        while left >= year_len(year) {
            left -= year_len(year);
            year += 1;
        }
        let year_day = left + 1;
        let mut month = 1;
        while left >= month_len(year, month) {
            left -= month_len(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day: left + 1,
            weekday: (days + 4).rem_euclid(7), // 1970 began on a Thursday
            year_day,
            seconds: seconds.rem_euclid(86_400),
        }
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn year_len(year: i64) -> i64 {
    if is_leap(year) { 366 } else { 365 }
}

fn month_len(year: i64, month: i64) -> i64 {
    match month {
        2 => 28 + i64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Formats a time as Python's `strftime` does; a directive that is not known is an error with its letter.
pub(super) fn strftime(time: SystemTime, format: &str) -> Result<String, String> {
    let moment = Moment::new(time);
    let mut out = String::new();
    let mut symbols = format.chars();
    while let Some(symbol) = symbols.next() {
        if symbol != '%' {
            out.push(symbol);
            continue;
        }
        let mut directive = symbols.next();
        let padded = directive != Some('-');
        if !padded {
            directive = symbols.next();
        }
        let directive = directive.ok_or("strftime_now: the format ends in %")?;
        moment.write(&mut out, directive, padded)?;
    }
    Ok(out)
}

impl Moment {
    fn write(&self, out: &mut String, directive: char, padded: bool) -> Result<(), String> {
        let month = MONTHS[self.month as usize - 1];
        let weekday = DAYS[self.weekday as usize];
        let hour = self.seconds / 3600;
        let minute = self.seconds / 60 % 60;
        let (number, width) = match directive {
            'Y' => (self.year, 4),
            'y' => (self.year.rem_euclid(100), 2),
            'm' => (self.month, 2),
            'd' => (self.day, 2),
            'j' => (self.year_day, 3),
            'H' => (hour, 2),
            'I' => ((hour + 11) % 12 + 1, 2),
            'M' => (minute, 2),
            'S' => (self.seconds % 60, 2),
            'w' => (self.weekday, 1),
            'B' => return push(out, month),
            'b' | 'h' => return push(out, &month[..3]),
            'A' => return push(out, weekday),
            'a' => return push(out, &weekday[..3]),
            'p' => return push(out, if hour < 12 { "AM" } else { "PM" }),
            'Z' => return Ok(()), // Python's clock without a zone writes nothing
            '%' => return push(out, "%"),
            'F' => return self.all(out, "Y-m-d"),
            'T' => return self.all(out, "H:M:S"),
            other => return Err(format!("strftime_now: %{other} is not supported")),
        };
        let width = if padded { width } else { 0 };
        write!(out, "{number:0width$}").map_err(|e| e.to_string())
    }

    /// Directives with the signs between them.
    fn all(&self, out: &mut String, directives: &str) -> Result<(), String> {
        for symbol in directives.chars() {
            if symbol.is_ascii_alphabetic() {
                self.write(out, symbol, true)?;
            } else {
                out.push(symbol);
            }
        }
        Ok(())
    }
}

fn push(out: &mut String, text: &str) -> Result<(), String> {
    out.push_str(text);
    Ok(())
}
