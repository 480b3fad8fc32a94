// Signs in by the code in the address of a link. The fragment is sent to nobody, and is cleared at once.
const form = document.getElementById("by-link");
const code = location.hash.slice(1);
if (code) {
  history.replaceState(null, "", location.pathname + location.search);
  form.elements.code.value = code;
  // Somebody who is signed in decides: a link of another person would lead to that person's tenant.
  if (!("asks" in form.dataset)) form.submit();
}
