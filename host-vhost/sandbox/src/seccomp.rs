//! seccomp filters from lists of rules.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};

use crate::SandboxError;

/// What one argument has to be. All comparisons are of the low 32 bits: so does the kernel with each argument that
/// is checked here (`int`, `unsigned int`), and what it takes as `unsigned long` has no meaning above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Argument number, and the value.
    Is(u8, u32),
    /// Argument number, and bits that have to be 0.
    Without(u8, u32),
    /// Argument number, a mask, and what the bits of the mask have to be: with a mask of high bits, a range of numbers.
    Within(u8, u32, u32),
}

/// A system call that may be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its number.
    pub number: i64,
    /// Its name.
    pub name: &'static str,
    /// All of these must hold. Several rules for one call are alternatives.
    pub checks: Vec<Check>,
    /// What needs it.
    pub why: &'static str,
}

/// A rule without checks, or with some.
macro_rules! rule {
    ($name:ident, $why:literal $(, $check:expr)* $(,)?) => {
        $crate::seccomp::Rule {
            number: libc::$name,
            name: stringify!($name),
            checks: vec![$($check),*],
            why: $why,
        }
    };
}
pub(crate) use rule;

fn condition(check: Check) -> Result<SeccompCondition, BackendError> {
    let dword = SeccompCmpArgLen::Dword;
    match check {
        Check::Is(argument, value) => {
            SeccompCondition::new(argument, dword, SeccompCmpOp::Eq, u64::from(value))
        }
        Check::Without(argument, bits) => {
            SeccompCondition::new(argument, dword, SeccompCmpOp::MaskedEq(u64::from(bits)), 0)
        }
        Check::Within(argument, mask, value) => {
            SeccompCondition::new(argument, dword, SeccompCmpOp::MaskedEq(u64::from(mask)), u64::from(value))
        }
    }
}

fn architecture() -> Result<TargetArch, BackendError> {
    TargetArch::try_from(std::env::consts::ARCH)
}

/// The program that lets exactly these calls pass and kills the process for any other.
pub fn allow_list(rules: &[Rule]) -> Result<BpfProgram, BackendError> {
    let mut filter: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for rule in rules {
        let conditions: Result<Vec<_>, _> = rule.checks.iter().map(|check| condition(*check)).collect();
        let alternatives = filter.entry(rule.number).or_default();
        if !rule.checks.is_empty() {
            alternatives.push(SeccompRule::new(conditions?)?);
        }
    }
    // seccompiler reads an empty list of alternatives as "always".
    for rule in rules.iter().filter(|rule| rule.checks.is_empty()) {
        filter.insert(rule.number, Vec::new());
    }
    SeccompFilter::new(filter, SeccompAction::KillProcess, SeccompAction::Allow, architecture()?)?.try_into()
}

/// The program that kills the process for exactly these calls.
pub fn deny_list(calls: &[(i64, &'static str)]) -> Result<BpfProgram, BackendError> {
    let filter = calls.iter().map(|(number, _)| (*number, Vec::new())).collect();
    SeccompFilter::new(filter, SeccompAction::Allow, SeccompAction::KillProcess, architecture()?)?.try_into()
}

/// The program that answers `clone3` as a kernel without it: its flags lie in memory, where no filter sees
/// them. glibc and Rust's standard library then use `clone`.
pub fn no_clone3() -> Result<BpfProgram, BackendError> {
    let filter = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let answer = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    SeccompFilter::new(filter, SeccompAction::Allow, answer, architecture()?)?.try_into()
}

/// Installs an allow-list, and [`no_clone3`] below it. Returns how many system calls it lets pass.
pub fn confine(list: &'static str, rules: &[Rule]) -> Result<usize, SandboxError> {
    let compile = |error| SandboxError::Compile { list, error };
    let install = |error| SandboxError::Install { list, error };
    let allow = allow_list(rules).map_err(compile)?;
    let clone3 = no_clone3().map_err(compile)?;
    apply_filter_all_threads(&clone3).map_err(install)?;
    apply_filter_all_threads(&allow).map_err(install)?;
    let mut numbers: Vec<i64> = rules.iter().map(|rule| rule.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers.len())
}

/// Installs a deny-list.
pub fn deny(list: &'static str, calls: &[(i64, &'static str)]) -> Result<(), SandboxError> {
    let program = deny_list(calls).map_err(|error| SandboxError::Compile { list, error })?;
    apply_filter_all_threads(&program).map_err(|error| SandboxError::Install { list, error })
}
