//! Lines that must be the same whatever kernel answers: no addresses, times or process ids.

use std::fmt::Display;

/// The answers so far.
#[derive(Default)]
pub struct Transcript {
    lines: Vec<String>,
}

impl Transcript {
    /// A fact.
    pub fn line(&mut self, question: &str, answer: impl Display) {
        self.lines.push(format!("{question}: {answer}"));
    }

    /// An answer that is an errno or something to print.
    pub fn result<T: Display>(&mut self, question: &str, answer: Result<T, i32>) {
        match answer {
            Ok(value) => self.line(question, value),
            Err(errno) => self.line(question, errno_name(errno)),
        }
    }

    /// Whether a call that answers nothing went well.
    pub fn done(&mut self, question: &str, answer: Result<(), i32>) {
        self.result(question, answer.map(|()| "ok"));
    }

    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}

/// The name of an errno.
pub fn errno_name(errno: i32) -> String {
    let known = [
        (libc::EPERM, "EPERM"),
        (libc::ENOENT, "ENOENT"),
        (libc::EIO, "EIO"),
        (libc::EBADF, "EBADF"),
        (libc::ENOMEM, "ENOMEM"),
        (libc::EACCES, "EACCES"),
        (libc::EFAULT, "EFAULT"),
        (libc::EBUSY, "EBUSY"),
        (libc::ENODEV, "ENODEV"),
        (libc::EINVAL, "EINVAL"),
        (libc::ENOTTY, "ENOTTY"),
        (libc::ENOSPC, "ENOSPC"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (524, "ENOTSUPP"),
    ];
    known
        .iter()
        .find(|(number, _)| *number == errno)
        .map_or(format!("errno {errno}"), |(_, name)| (*name).into())
}
