//! One line for each step: a bar where standard error is a terminal, plain lines elsewhere.
//!
//! Progress goes to standard error, so that the standard output of a command carries its result only.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A step that is under way.
#[derive(Debug)]
pub struct Step {
    name: String,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl Step {
    /// Begins a step and says so.
    pub fn begin(name: impl Into<String>) -> Self {
        let name = name.into();
        let bar = if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(100), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{prefix} {spinner} {wide_msg} {elapsed}") {
                bar.set_style(style);
            }
            bar.set_prefix(name.clone());
            bar.enable_steady_tick(Duration::from_millis(120));
            Some(bar)
        } else {
            eprintln!("{name} ...");
            None
        };
        Self { name, started: Instant::now(), bar }
    }

    /// Says how far the step is, in percent of the whole, and what it does now.
    pub fn percent(&self, percent: f64, doing: &str) {
        if let Some(bar) = &self.bar {
            if let Ok(style) =
                ProgressStyle::with_template("{prefix} [{bar:30}] {percent:>3}% {wide_msg} {elapsed}")
            {
                bar.set_style(style);
            }
            bar.set_position(percent.clamp(0.0, 100.0) as u64);
            bar.set_message(doing.to_owned());
        }
    }

    /// Says what the step does now.
    pub fn doing(&self, doing: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(doing.to_owned());
        }
    }

    /// Ends the step; `result` is a few words about what came out of it.
    pub fn done(self, result: &str) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.started.elapsed().as_secs_f64();
        let gap = if result.is_empty() { "" } else { ": " };
        eprintln!("{}{gap}{result} ({seconds:.1} s)", self.name);
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
