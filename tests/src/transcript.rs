//! Outputs of one program with two libraries under it, compared line by line.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::gpu_view::GpuView;
use crate::talk::Talk;

/// How long a program may be silent.
const SILENCE: Duration = Duration::from_secs(120);

/// Fails with each line in which two texts differ; `places` says what printed the first and the second.
#[track_caller]
pub fn assert_same_lines(what: &str, places: (&str, &str), first: &str, second: &str) {
    let (left, right): (Vec<&str>, Vec<&str>) = (first.lines().collect(), second.lines().collect());
    let differ: Vec<String> = (0..left.len().max(right.len()))
        .map(|line| (line, left.get(line), right.get(line)))
        .filter(|(_, left, right)| left != right)
        .map(|(line, left, right)| format!("line {line}: {} {left:?}, {} {right:?}", places.0, places.1))
        .collect();
    assert!(differ.is_empty(), "{what}:\n{}", differ.join("\n"));
}

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

/// What a program printed, and how it ended.
#[derive(Debug)]
pub struct Outcome {
    /// Its lines, requests not among them.
    pub lines: Vec<String>,
    /// Why it did not come to a good end.
    pub error: Option<anyhow::Error>,
}

impl Outcome {
    /// Leaves the lines in a file of the directory that the environment variable names, if it does.
    pub fn keep(&self, variable: &str, name: &str) {
        let Some(directory) = std::env::var_os(variable).filter(|value| !value.is_empty()) else { return };
        let mut text = self.lines.join("\n");
        if let Some(error) = &self.error {
            text.push_str(&format!("\n{error:#}"));
        }
        let path = Path::new(&directory).join(name);
        // For a person who looks; the test does not stand on it.
        if let Err(error) =
            std::fs::create_dir_all(&directory).and_then(|()| std::fs::write(&path, text + "\n"))
        {
            eprintln!("write {}: {error}", path.display());
        }
    }
}

/// Lets a program run to its end and answers its requests.
pub fn listen(program: Box<dyn Talk>, view: &mut GpuView) -> Outcome {
    listen_with(program, view, &mut |what| bail!("nobody does {what:?} here"))
}

/// As [`listen`]; `act` does what the program waits for (a line `@wait WHAT`) and answers a number.
pub fn listen_with(
    mut program: Box<dyn Talk>,
    view: &mut GpuView,
    act: &mut dyn FnMut(&str) -> Result<u64>,
) -> Outcome {
    let mut lines: Vec<String> = Vec::new();
    let outcome = loop {
        match program.next_line(SILENCE) {
            Ok(Some(line)) if line.starts_with('@') => {
                let answer = match line.strip_prefix("@wait ") {
                    Some(what) => act(what).map(|number| number.to_string()),
                    None => view.answer(&line),
                };
                if let Err(error) = answer.and_then(|answer| program.say(&answer)) {
                    break Err(error);
                }
            }
            Ok(Some(line)) => lines.push(line),
            Ok(None) => break program.finish(),
            Err(error) => break Err(error),
        }
    };
    Outcome { lines, error: outcome.err() }
}

/// Compares two outputs.
///
/// # Errors
/// A program that failed, lines that differ and are no exception, or an exception that did not occur.
pub fn compare(native: &Outcome, ours: &Outcome, exceptions: &[Exception]) -> Result<()> {
    if let Some(error) = &native.error {
        bail!("natively after {} lines: {error:#}\n{}", native.lines.len(), tail(&native.lines));
    }
    let compared = compare_lines(&native.lines, &ours.lines, exceptions);
    match &ours.error {
        Some(error) => {
            bail!("ours after {} lines: {error:#}\n{}\n{compared:?}", ours.lines.len(), tail(&ours.lines))
        }
        None => compared,
    }
}

fn tail(lines: &[String]) -> String {
    lines.get(lines.len().saturating_sub(5)..).unwrap_or_default().join("\n")
}

fn compare_lines(native: &[String], ours: &[String], exceptions: &[Exception]) -> Result<()> {
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
        compare_lines(&native, &native, &[]).unwrap();
        let ours = lines("= a\none = 3\ntwo = 2\n= b\none = 1");
        compare_lines(&native, &ours, &[exception]).unwrap();
        assert!(compare_lines(&native, &ours, &[]).is_err());
        // Not in another section, not with another result.
        assert!(compare_lines(&native, &lines("= a\none = 3\ntwo = 2\n= b\none = 3"), &[exception]).is_err());
        assert!(compare_lines(&native, &lines("= a\none = 4\ntwo = 2\n= b\none = 1"), &[exception]).is_err());
        // An exception that is not needed any more is one too many.
        assert!(compare_lines(&native, &native, &[exception]).is_err());
        assert!(compare_lines(&native, &native[..3], &[]).is_err());
    }
}
