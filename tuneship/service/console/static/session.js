// Signs in by the code in the address of a link. The fragment is sent to nobody, and is cleared at once.
const form = document.getElementById("by-link");

function take() {
  const code = location.hash.slice(1);
  if (!code) return;
  history.replaceState(null, "", location.pathname + location.search);
  form.elements.code.value = code;
  // Somebody who is signed in decides: a link of another person would lead to that person's tenant.
  if (!("asks" in form.dataset)) form.submit();
}

take();
// A link that is pasted into the address bar of this very page loads no page.
addEventListener("hashchange", take);
