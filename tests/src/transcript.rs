//! Outputs of one program with two libraries under it, compared line by line.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::gpu_view::GpuView;
use crate::talk::Talk;

/// How long a program may be silent.
const SILENCE: Duration = Duration::from_secs(120);

/// A line that may differ: exactly these two, in this section.
#[derive(Debug, Clone, Copy)]
pub struct Exception {
    /// The section; lines `= NAME` begin one.
    pub section: &'static str,
    /// The native line.
    pub native: &'static str,
    /// Ours.
    pub ours: &'static str,
    /// Why it differs. For the reader; a difference without a reason is a defect.
    pub why: &'static str,
}

/// Lets a program run to its good end and answers its requests; what it printed besides.
///
/// # Errors
/// It failed, was silent, or made a request that cannot be answered; the message has its last lines.
pub fn listen(mut program: Box<dyn Talk>, view: &mut GpuView) -> Result<Vec<String>> {
    let mut lines: Vec<String> = Vec::new();
    let outcome = loop {
        match program.next_line(SILENCE) {
            Ok(Some(line)) if line.starts_with('@') => {
                if let Err(error) = view.answer(&line).and_then(|answer| program.say(&answer)) {
                    break Err(error);
                }
            }
            Ok(Some(line)) => lines.push(line),
            Ok(None) => break program.finish(),
            Err(error) => break Err(error),
        }
    };
    outcome.with_context(|| format!("after these lines:\n{}", tail(&lines)))?;
    Ok(lines)
}

fn tail(lines: &[String]) -> String {
    lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n")
}

/// Compares two outputs.
///
/// # Errors
/// Lines that differ and are no exception, an exception that did not occur, or outputs of different lengths.
pub fn compare(native: &[String], ours: &[String], exceptions: &[Exception]) -> Result<()> {
    let mut used = vec![0_usize; exceptions.len()];
    let (mut section, mut heading) = ("", "");
    let mut differ = Vec::new();
    for number in 0..native.len().max(ours.len()) {
        let (a, b) = (native.get(number).map(String::as_str), ours.get(number).map(String::as_str));
        if let Some(name) = a.and_then(|line| line.strip_prefix("= ")) {
            section = name;
        }
        if let Some(name) = a.and_then(|line| line.strip_prefix("== ")) {
            heading = name;
        }
        if a == b {
            continue;
        }
        let allowed = exceptions.iter().position(|exception| {
            exception.section == section && a == Some(exception.native) && b == Some(exception.ours)
        });
        match allowed.and_then(|index| used.get_mut(index)) {
            Some(count) => *count = count.saturating_add(1),
            None => differ.push(format!(
                "line {number}, {section}, {heading}\n  native {}\n  ours   {}",
                a.unwrap_or("(no line)"),
                b.unwrap_or("(no line)")
            )),
        }
    }
    let count = differ.len();
    differ.truncate(25);
    let sections: Vec<&str> = native.iter().filter_map(|line| line.strip_prefix("= ")).collect();
    for (exception, used) in exceptions.iter().zip(used) {
        if used == 0 && sections.contains(&exception.section) {
            differ.push(format!("an exception that did not occur: {exception:?}"));
        }
    }
    if !differ.is_empty() {
        bail!("{count} lines differ\n{}", differ.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn only_what_is_excepted_may_differ() {
        let native = lines("= a\none = 1\ntwo = 2\n= b\none = 1");
        let exception = Exception { section: "a", native: "one = 1", ours: "one = 3", why: "a test" };
        compare(&native, &native, &[]).unwrap();
        let ours = lines("= a\none = 3\ntwo = 2\n= b\none = 1");
        compare(&native, &ours, &[exception]).unwrap();
        assert!(compare(&native, &ours, &[]).is_err());
        // Not in another section, not with another result.
        assert!(compare(&native, &lines("= a\none = 3\ntwo = 2\n= b\none = 3"), &[exception]).is_err());
        assert!(compare(&native, &lines("= a\none = 4\ntwo = 2\n= b\none = 1"), &[exception]).is_err());
        // An exception that is not needed any more is one too many.
        assert!(compare(&native, &native, &[exception]).is_err());
        assert!(compare(&native, &native[..3], &[]).is_err());
    }
}
